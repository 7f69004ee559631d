"""Names of the gRPC contract by which weights are fetched: from the learner, and from generators that relay them."""

from rollmesh.protos import weights_pb2

SERVICE_NAME = weights_pb2.DESCRIPTOR.services_by_name["Weights"].full_name
