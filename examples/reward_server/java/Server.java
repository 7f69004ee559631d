// A reward server of your own in Java, over HTTP, with the JDK alone. Json.java stands in for a library.
//   javac Server.java Json.java && java Server [PORT]
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.concurrent.Executors;
import java.util.stream.Collectors;

public class Server {
    static final int MAX_BYTES = 80 << 20;

    /** One item in, one typed outcome out. Here: is the response the ground truth? */
    static String judge(Map<?, ?> item) {
        String truth = (String) item.get("ground_truth_json");
        if (truth == null || truth.isEmpty()) return "\"unscorable\":{\"reason\":\"the row has no ground truth\"}";
        String response = Objects.toString(item.get("response"), "");
        int correct = response.strip().equals(String.valueOf(new Json(truth).whole()).strip()) ? 1 : 0;
        return "\"scored\":{\"total\":%d,\"components\":{\"correct\":%d}}".formatted(correct, correct);
    }

    static String result(Map<?, ?> item) {
        String outcome;
        try {
            outcome = judge(item);
        } catch (RuntimeException | StackOverflowError error) { // A failure is said, never scored as zero.
            outcome = "\"error\":{\"code\":\"exception\",\"message\":" + Json.quoted(error.toString()) + "}";
        }
        return "{\"item_id\":" + Json.quoted((String) item.get("item_id")) + "," + outcome + "}";
    }

    static String score(String body) {
        List<?> items = (List<?>) ((Map<?, ?>) new Json(body).whole()).get("items");
        return "{\"results\":[" + items.stream().map(item -> result((Map<?, ?>) item)).collect(Collectors.joining(",")) + "]}";
    }

    public static void main(String[] arguments) throws IOException {
        System.setProperty("sun.net.httpserver.nodelay", "true"); // else each answer waits 40 ms
        int port = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 50061;
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", port), 256);
        server.createContext("/v1/", exchange -> {
            int status = 200;
            String answer = "{\"name\":\"java-example\",\"version\":\"1\",\"deterministic\":true,\"wants_ids\":false}";
            byte[] body = exchange.getRequestBody().readNBytes(MAX_BYTES + 1);
            try {
                if (body.length > MAX_BYTES) status = 413;
                else if (exchange.getRequestURI().getPath().equals("/v1/score")) answer = score(new String(body, StandardCharsets.UTF_8));
            } catch (RuntimeException | StackOverflowError error) {
                status = 400;
            }
            byte[] bytes = answer.getBytes(StandardCharsets.UTF_8);
            exchange.sendResponseHeaders(status, bytes.length);
            exchange.getResponseBody().write(bytes);
            exchange.close();
        });
        server.setExecutor(Executors.newCachedThreadPool());
        server.start();
        System.out.println("listening on 127.0.0.1:" + server.getAddress().getPort());
    }
}
