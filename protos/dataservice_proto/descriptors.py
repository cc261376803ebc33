"""Classes of messages and services, made from their descriptor when a stub is imported.

protoc's own Python code refuses each protobuf and grpcio that is older than the compiler, and
trainer images pin old ones. What is called here is public in all of them, except for
EnumTypeWrapper, which protoc's code has always used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, ServiceDescriptorProto
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def message_names(file: FileDescriptor, module: str) -> dict[str, Any]:
    """What the module of a file's messages defines: its messages, and its enumerations with
    their values."""
    names: dict[str, Any] = {}
    for name, message in file.message_types_by_name.items():
        names[name] = _message_class(message)
        names[name].__module__ = module
    for name, enum in file.enum_types_by_name.items():
        names[name] = EnumTypeWrapper(enum)
        names.update((value.name, value.number) for value in enum.values)
    return names


def service_names(file: FileDescriptor, module: str) -> dict[str, Any]:
    """What the module of a file's services defines: of each its stub, its servicer, and the
    function that adds a servicer to a server; of grpc or of grpc.aio."""
    names: dict[str, Any] = {}
    for service in FileDescriptorProto.FromString(file.serialized_pb).service:
        name, full_name = service.name, f"{file.package}.{service.name}"
        methods = _methods(file, service)
        stub = {"__module__": module, "__init__": _connection(methods)}
        servicer = {"__module__": module, **{each.name: _unimplemented(each) for each in methods}}
        names[f"{name}Stub"] = type(f"{name}Stub", (), stub)
        names[f"{name}Servicer"] = type(f"{name}Servicer", (), servicer)
        names[f"add_{name}Servicer_to_server"] = _registration(full_name, methods)
    return names


def _message_class(message: Descriptor) -> Any:
    if hasattr(message_factory, "GetMessageClass"):  # since protobuf 4.22
        return message_factory.GetMessageClass(message)
    return message_factory.MessageFactory().GetPrototype(message)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    path: str
    kind: str  # as grpc names it: unary_unary, unary_stream, stream_unary or stream_stream
    request: Any
    response: Any


def _methods(file: FileDescriptor, service: ServiceDescriptorProto) -> list[_Method]:
    # The names and classes are the descriptor's; only its serialized form tells what is a stream,
    # whatever the version of protobuf.
    described = file.services_by_name[service.name]
    streams = ("unary", "stream")
    return [
        _Method(
            name=method.name,
            path=f"/{described.full_name}/{method.name}",
            kind=f"{streams[method.client_streaming]}_{streams[method.server_streaming]}",
            request=_message_class(described.methods_by_name[method.name].input_type),
            response=_message_class(described.methods_by_name[method.name].output_type),
        )
        for method in service.method
    ]


def _connection(methods: list[_Method]) -> Callable[[Any, Any], None]:
    def connect(self: Any, channel: Any) -> None:
        for method in methods:
            call = getattr(channel, method.kind)(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            setattr(self, method.name, call)

    return connect


def _unimplemented(method: _Method) -> Callable[[Any, Any, Any], None]:
    def answer(self: Any, request: Any, context: Any) -> None:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details(f"{method.path} is not implemented")
        raise NotImplementedError(f"{method.path} is not implemented")

    return answer


def _registration(service: str, methods: list[_Method]) -> Callable[[Any, Any], None]:
    def add(servicer: Any, server: Any) -> None:
        handlers = {
            method.name: getattr(grpc, f"{method.kind}_rpc_method_handler")(
                getattr(servicer, method.name),
                request_deserializer=method.request.FromString,
                response_serializer=method.response.SerializeToString,
            )
            for method in methods
        }
        generic = grpc.method_handlers_generic_handler(service, handlers)
        server.add_generic_rpc_handlers((generic,))

    return add
