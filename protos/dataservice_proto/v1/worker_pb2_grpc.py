"""The services of dataservice_proto/v1/worker.proto. Written by tools/protos.py: do not edit."""

from dataservice_proto.descriptors import service_names
from dataservice_proto.v1 import worker_pb2

globals().update(service_names(worker_pb2.DESCRIPTOR, __name__))
