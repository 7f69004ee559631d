"""gRPC options that both ends of a connection share: message sizes, signs of life, frames and windows."""

from __future__ import annotations

# Seconds of silence after which a peer is asked for a sign of life; it has 0.8 times as long to give one. A peer that
# hangs or is cut off is thus noticed well within a lease term.
KEEPALIVE_S = 5.0


def keepalive_of(lease_s: float) -> float:
    """The same between members and fronts: a third of a lease term.

    Long terms are for many generators. They save these signs too, and a side that is slow keeps its connection.
    """
    return max(KEEPALIVE_S, lease_s / 3)


def connection_options(max_message_mb: int, keepalive_s: float = KEEPALIVE_S) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_mb << 20),
        ("grpc.max_receive_message_length", max_message_mb << 20),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_s * 800)),
        # The ping's own deadline; without it a minute, whatever the one above says.
        ("grpc.http2.ping_timeout_ms", round(keepalive_s * 800)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The shortest interval between pings that a server accepts.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # A message of a megabyte is one frame, and windows hold several: 7 % less CPU per payload of 16 KB.
        ("grpc.http2.max_frame_size", 1 << 20),
        ("grpc.http2.lookahead_bytes", 8 << 20),
        ("grpc.http2.bdp_probe", 0),
    ]
