// A reward server of your own in Rust, over HTTP, with the standard library alone. json.rs stands in for a crate.
//   rustc -O server.rs && ./server [PORT]
mod json;
use json::Json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

const MAX_BYTES: usize = 80 << 20;
const INFO: &str = r#"{"name":"rust-example","version":"1","deterministic":true,"wants_ids":false}"#;

/// One item in, one typed outcome out. Here: is the response the ground truth?
fn judge(item: &Json) -> Result<String, String> {
    let truth = item.text("ground_truth_json");
    if truth.is_empty() {
        return Ok(r#""unscorable":{"reason":"the row has no ground truth"}"#.into());
    }
    let correct = (item.text("response").trim() == Json::parse(&truth)?.to_string().trim()) as u8;
    Ok(format!(r#""scored":{{"total":{correct},"components":{{"correct":{correct}}}}}"#))
}

fn score(body: &str) -> Result<String, String> {
    let request = Json::parse(body)?;
    let results = request.list("items").iter().map(|item| {
        // A failure is said, never scored as zero.
        let outcome = judge(item).unwrap_or_else(|error| {
            format!(r#""error":{{"code":"bad_input","message":{}}}"#, json::quoted(&error))
        });
        format!(r#"{{"item_id":{},{outcome}}}"#, json::quoted(&item.text("item_id")))
    });
    Ok(format!(r#"{{"results":[{}]}}"#, results.collect::<Vec<_>>().join(",")))
}

fn answer(path: &str, body: Option<String>) -> (&'static str, String) {
    match (path, body) {
        (_, None) => ("413 Content Too Large", String::new()),
        ("/v1/info", _) => ("200 OK", INFO.into()),
        ("/v1/score", Some(body)) => match score(&body) {
            Ok(results) => ("200 OK", results),
            Err(error) => ("400 Bad Request", error),
        },
        _ => ("404 Not Found", String::new()),
    }
}

/// Answers the requests of one connection until it ends.
fn serve(stream: TcpStream) -> std::io::Result<()> {
    let mut output = stream.try_clone()?;
    let mut input = BufReader::new(stream);
    loop {
        let (mut path, mut length, mut line) = (String::new(), 0, String::new());
        while input.read_line(&mut line)? > 2 {
            match line.split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => length = value.trim().parse().unwrap_or(0),
                _ if path.is_empty() => path = line.split(' ').nth(1).unwrap_or_default().to_string(),
                _ => {}
            }
            line.clear();
        }
        if path.is_empty() {
            return Ok(());
        }
        let mut body = vec![0; length.min(MAX_BYTES)];
        input.read_exact(&mut body)?;
        std::io::copy(&mut input.by_ref().take((length - body.len()) as u64), &mut std::io::sink())?;
        let body = (length <= MAX_BYTES).then(|| String::from_utf8_lossy(&body).into_owned());
        let (status, text) = answer(&path, body);
        output.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{text}", text.len()).as_bytes())?;
    }
}

fn main() -> std::io::Result<()> {
    let port = std::env::args().nth(1).unwrap_or("50061".into());
    let listener = TcpListener::bind(format!("127.0.0.1:{port}"))?;
    println!("listening on {}", listener.local_addr()?);
    for stream in listener.incoming() {
        std::thread::spawn(|| stream.and_then(serve));
    }
    Ok(())
}
