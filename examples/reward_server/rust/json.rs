// JSON for server.rs, so that it needs the standard library alone: use serde_json in its place.
use std::fmt;

const DEEPEST: usize = 100;

/// A value; numbers, true, false and null are their own text.
pub enum Json {
    Text(String),
    Plain(String),
    List(Vec<Json>),
    Map(Vec<(String, Json)>),
}

impl Json {
    pub fn parse(text: &str) -> Result<Json, String> {
        let mut reader = Reader { text: text.as_bytes(), at: 0 };
        let value = reader.value(0)?;
        reader.space();
        if reader.at < reader.text.len() { reader.bad() } else { Ok(value) }
    }

    fn get(&self, name: &str) -> Option<&Json> {
        let Json::Map(pairs) = self else { return None };
        pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// A field as text; empty if it is missing.
    pub fn text(&self, name: &str) -> String {
        self.get(name).map(Json::to_string).unwrap_or_default()
    }

    pub fn list(&self, name: &str) -> &[Json] {
        if let Some(Json::List(items)) = self.get(name) { items } else { &[] }
    }
}

impl fmt::Display for Json {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Json::Text(text) | Json::Plain(text) => out.write_str(text),
            _ => out.write_str("(a list or an object)"),
        }
    }
}

pub fn quoted(text: &str) -> String {
    let escaped = |c: char| if c < ' ' || c == '"' || c == '\\' { format!("\\u{:04x}", c as u32) } else { c.into() };
    format!("\"{}\"", text.chars().map(escaped).collect::<String>())
}

struct Reader<'a> { text: &'a [u8], at: usize }

impl Reader<'_> {
    fn bad<T>(&self) -> Result<T, String> { Err(format!("not JSON at {}", self.at)) }

    fn peek(&self) -> u8 { *self.text.get(self.at).unwrap_or(&0) }

    fn space(&mut self) { while b" \t\r\n".contains(&self.peek()) && self.at < self.text.len() { self.at += 1 } }

    fn took(&mut self, wanted: u8) -> bool {
        self.space();
        let is_there = self.peek() == wanted;
        self.at += is_there as usize;
        is_there
    }

    fn need(&mut self, wanted: u8) -> Result<(), String> { if self.took(wanted) { Ok(()) } else { self.bad() } }

    fn value(&mut self, depth: usize) -> Result<Json, String> {
        if depth > DEEPEST { return self.bad() }
        if self.took(b'"') { return Ok(Json::Text(self.string()?)) }
        if self.took(b'[') {
            let mut items = vec![];
            if self.took(b']') { return Ok(Json::List(items)) }
            loop {
                items.push(self.value(depth + 1)?);
                if !self.took(b',') { self.need(b']')?; return Ok(Json::List(items)) }
            }
        }
        if self.took(b'{') {
            let mut pairs = vec![];
            if self.took(b'}') { return Ok(Json::Map(pairs)) }
            loop {
                self.need(b'"')?;
                let key = self.string()?;
                self.need(b':')?;
                pairs.push((key, self.value(depth + 1)?));
                if !self.took(b',') { self.need(b'}')?; return Ok(Json::Map(pairs)) }
            }
        }
        let rest = &self.text[self.at..];
        let end = rest.iter().position(|c| !(c.is_ascii_alphanumeric() || b"+-.".contains(c))).unwrap_or(rest.len());
        let word = String::from_utf8_lossy(&rest[..end]).into_owned();
        if !["true", "false", "null"].contains(&&*word) && word.parse::<f64>().is_err() { return self.bad() }
        self.at += end;
        Ok(Json::Plain(word))
    }

    fn string(&mut self) -> Result<String, String> {
        let mut bytes = vec![];
        let mut units = vec![]; // of escaped UTF-16, whose surrogates come in pairs
        loop {
            let (c, escaped) = (self.peek(), self.text[self.at..].starts_with(b"\\u"));
            if !escaped && !units.is_empty() {
                bytes.extend(String::from_utf16_lossy(&std::mem::take(&mut units)).bytes());
            }
            if self.at >= self.text.len() { return self.bad() }
            self.at += 1;
            match c {
                b'"' => return String::from_utf8(bytes).map_err(|error| error.to_string()),
                b'\\' if escaped => {
                    let digits = self.text.get(self.at + 1..self.at + 5).and_then(|d| std::str::from_utf8(d).ok());
                    let Some(Ok(unit)) = digits.map(|digits| u16::from_str_radix(digits, 16)) else { return self.bad() };
                    units.push(unit);
                    self.at += 5;
                }
                b'\\' => {
                    let place = b"bfnrt".iter().position(|&known| known == self.peek());
                    bytes.push(place.map_or(self.peek(), |place| b"\x08\x0c\n\r\t"[place]));
                    self.at += 1;
                }
                _ => bytes.push(c),
            }
        }
    }
}
