"""A reward server of your own: this file, reward.proto next to it, and gRPC (pip install grpcio grpcio-tools).

Run: python server.py [PORT]
"""

import json
import sys
from concurrent import futures
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parent))  # where reward.proto is looked for
pb, rpc = grpc.protos_and_services("reward.proto")


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
            try:
                response.results.add(item_id=item.item_id, **judge(item))
            except Exception as error:  # noqa: BLE001 - a failure is said, never scored as zero
                response.results.add(item_id=item.item_id, error=pb.Error(code="exception", message=repr(error)))
        return response

    def Info(self, request, context):
        return pb.InfoResponse(name="example", version="1", max_items=128)


if __name__ == "__main__":
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    rpc.add_RewardServicer_to_server(Reward(), server)
    port = server.add_insecure_port(f"127.0.0.1:{sys.argv[1] if len(sys.argv) > 1 else 50061}")
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()
