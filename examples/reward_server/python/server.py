"""A reward server of your own: this file, reward.proto in the folder above, and gRPC.

pip install grpcio grpcio-tools grpcio-health-checking
python server.py [PORT]
"""

import json
import sys
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where reward.proto is looked for
pb, rpc = grpc.protos_and_services("reward.proto")
MAX_BYTES = 64 << 20  # gRPC's own limit is 4 MiB


def judge(item):
    """One item in, one typed outcome out. Here: is the response the ground truth, and is it short?"""
    if not item.ground_truth_json:
        return {"unscorable": pb.Unscorable(reason="the row has no ground truth")}
    correct = float(item.response.strip() == str(json.loads(item.ground_truth_json)).strip())
    brevity = 0.1 / (1 + len(item.response_ids))
    return {"scored": pb.Scored(total=correct + brevity, components={"correct": correct, "brevity": brevity})}


class Reward(rpc.RewardServicer):
    def Score(self, request, context):
        response = pb.ScoreResponse()
        for item in request.items:
            if not context.is_active():  # the caller has given up, or its deadline has passed
                break
            try:
                response.results.add(item_id=item.item_id, **judge(item))
            except Exception as error:  # noqa: BLE001 - a failure is said, never scored as zero
                response.results.add(item_id=item.item_id, error=pb.Error(code="exception", message=repr(error)))
        return response

    def Info(self, request, context):
        return pb.InfoResponse(name="example", version="1", max_items=128, max_bytes=MAX_BYTES, deterministic=True)


if __name__ == "__main__":
    limits = [("grpc.max_receive_message_length", MAX_BYTES), ("grpc.max_send_message_length", MAX_BYTES)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=limits)
    rpc.add_RewardServicer_to_server(Reward(), server)
    alive = health.HealthServicer()
    alive.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    port = server.add_insecure_port(f"127.0.0.1:{sys.argv[1] if len(sys.argv) > 1 else 50061}")
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()
