// JSON for Server.java, so that it needs the JDK alone: use a library in its place.
import java.util.*;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/** JSON as maps, lists and strings; any other value is its own text. */
class Json {
    static final Pattern VALUE = Pattern.compile("true|false|null|-?[0-9][-+.0-9eE]*");
    final String text;
    int at;

    Json(String text) { this.text = text + "\0"; }

    Object whole() {
        Object value = value();
        need('\0');
        return value;
    }

    Object value() {
        if (took('"')) return string();
        if (took('[')) {
            List<Object> list = new ArrayList<>();
            if (!took(']')) { do list.add(value()); while (took(',')); need(']'); }
            return list;
        }
        if (took('{')) {
            Map<String, Object> map = new HashMap<>();
            if (!took('}')) { do { need('"'); String key = string(); need(':'); map.put(key, value()); } while (took(',')); need('}'); }
            return map;
        }
        var found = VALUE.matcher(text).region(at, text.length());
        if (!found.lookingAt()) need('\0');
        at = found.end();
        return found.group();
    }

    boolean took(char wanted) {
        while (" \t\r\n".indexOf(text.charAt(at)) >= 0) at++;
        if (text.charAt(at) != wanted) return false;
        at++;
        return true;
    }

    void need(char wanted) { if (!took(wanted)) throw new IllegalArgumentException("not JSON at " + at); }

    String string() {
        StringBuilder out = new StringBuilder();
        for (char c; (c = text.charAt(at++)) != '"'; ) {
            if (c != '\\') { out.append(c); continue; }
            int place = "bfnrt".indexOf(c = text.charAt(at++));
            if (c == 'u') out.append((char) Integer.parseInt(text.substring(at, at += 4), 16));
            else out.append(place < 0 ? c : "\b\f\n\r\t".charAt(place));
        }
        return out.toString();
    }

    static String quoted(String text) {
        return text.chars().mapToObj(c -> c < 32 || c == '"' || c == '\\' || c > 126 ? "\\u%04x".formatted(c) : "" + (char) c)
            .collect(Collectors.joining("", "\"", "\""));
    }
}
