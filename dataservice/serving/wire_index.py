"""Orders and answers of indexing, between protobuf and core."""

from dataservice_proto.v1 import worker_pb2

from dataservice.core.errors import ServiceError
from dataservice.core.index_orders import (
    IndexAnswer,
    IndexOrder,
    IndexPlaces,
    IndexProgress,
    IndexResult,
    IndexWaiting,
)


def index_order_to_proto(order: IndexOrder) -> worker_pb2.IndexOrder:
    """An errand for a worker."""
    return worker_pb2.IndexOrder(pipeline=order.pipeline, errand=order.errand)


def index_order_from_proto(proto: worker_pb2.IndexOrder) -> IndexOrder:
    """What `index_order_to_proto` made."""
    return IndexOrder(pipeline=proto.pipeline, errand=proto.errand)


def index_answer_to_proto(answer: IndexAnswer) -> worker_pb2.IndexAnswer:
    """An answer to an errand."""
    if isinstance(answer, bytes):
        return worker_pb2.IndexAnswer(data=answer)
    if isinstance(answer, IndexWaiting):
        return worker_pb2.IndexAnswer(waiting=answer.why)
    if isinstance(answer, IndexPlaces):
        return worker_pb2.IndexAnswer(places=answer.places)
    if isinstance(answer, IndexProgress):
        progress = worker_pb2.IndexProgress(rows=answer.rows, size_bytes=answer.size_bytes)
        return worker_pb2.IndexAnswer(progress=progress)
    result = worker_pb2.IndexResult(
        place=answer.place, size_bytes=answer.size_bytes, damage=answer.damage
    )
    return worker_pb2.IndexAnswer(result=result)


def index_answer_from_proto(proto: worker_pb2.IndexAnswer) -> IndexAnswer:
    """What `index_answer_to_proto` made. Raises ServiceError where it is of another release."""
    kind = proto.WhichOneof("content")
    if kind == "data":
        return proto.data
    if kind == "waiting":
        return IndexWaiting(why=proto.waiting)
    if kind == "places":
        return IndexPlaces(places=proto.places)
    if kind == "progress":
        return IndexProgress(rows=proto.progress.rows, size_bytes=proto.progress.size_bytes)
    if kind == "result":
        result = proto.result
        return IndexResult(place=result.place, size_bytes=result.size_bytes, damage=result.damage)
    raise ServiceError("an answer of another release came. Run one release of service and clients.")
