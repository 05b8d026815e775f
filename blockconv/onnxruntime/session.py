"""`InferenceSession`: an ONNX model with a plan behind ONNX Runtime's interface."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from blockconv.core import target
from blockconv.core.errors import ArgumentError, BlockconvError, NetworkError, UnsupportedError, warn
from blockconv.core.files import StrPath
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.frontends.onnx import open_onnx
from blockconv.frontends.onnx.file import without_weights
from blockconv.frontends.onnx.rules import with_inferred
from blockconv.network.plan import Plan, compile
from blockconv.onnxruntime.errors import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
    NotImplemented,
)
from blockconv.onnxruntime.options import RunOptions, SessionOptions
from blockconv.onnxruntime.values import (
    ModelMetadata,
    NodeArg,
    OrtValue,
    array_at,
    check_device,
    dtype_named,
    type_name,
    type_text,
)

PROVIDERS = ["CPUExecutionProvider"]
SMALL = 1024  # elements of a tensor on which shapes may depend
FIX = "Please fix either the inputs/outputs or the model."


class InferenceSession:
    """An ONNX model that runs in blockconv, with the interface of `onnxruntime.InferenceSession`.

    path_or_bytes: the path of a model, or its bytes.
    sess_options: see `SessionOptions`.
    providers: names, or (name, options) pairs. The only provider is CPUExecutionProvider. Others warn.
    provider_options: a dict for each provider, without effect.
    enable_fallback: 0 raises ValueError for providers or options of other types. By default they warn.

    A model whose inputs have fixed shapes is compiled here, any other one at its first run. Several threads may run
    one session at once. Pickles and copies hold the model.
    Raises NoSuchFile, InvalidProtobuf, InvalidGraph or NotImplemented for a model that cannot be loaded.
    """

    def __init__(
        self,
        path_or_bytes: StrPath | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        source = _source(path_or_bytes)
        if not isinstance(sess_options, SessionOptions | None):
            raise TypeError(f"sess_options={sess_options!r}: has to be a blockconv.onnxruntime.SessionOptions")
        self._options = SessionOptions() if sess_options is None else sess_options
        self._options.log_unused()
        try:
            _check_providers(providers, provider_options)
        except ValueError as error:
            if not kwargs.get("enable_fallback", 1):
                raise
            warn(f"{error}. The session runs on the CPU", 2, UserWarning)
        try:  # load now: at the first run a file may be gone or another one
            model, self._network_of = open_onnx(source, initializers=self._options.initializers)
        except BlockconvError as error:
            raise _as_theirs(error) from error
        held = {tensor.name for tensor in model.graph.initializer}
        held |= {tensor.values.name for tensor in model.graph.sparse_initializer}
        unknown = sorted(self._options.external - held)
        if unknown:
            raise Fail(f"Failed to find existing initializer with name {unknown[0]}.")
        needed, more = ([v for v in model.graph.input if (v.name in held) is initial] for initial in (False, True))
        self._inputs = [_argument(value, self._options) for value in needed]
        self._outputs = [*_results(model, self._options)]
        # Up to IR version 3, every initializer is declared as an input, though it is none.
        self._overridable = [_argument(value, self._options) for value in more if model.ir_version > 3]
        self._declared = {one.name: one for one in self._inputs}
        self._required = [one.name for one in self._inputs if not one.type.startswith("optional")]
        self._results = [one.name for one in self._outputs]
        self._passed: dict[str, tuple[Any, ...]] = {}  # the shape and dtype of each input's last array that was right
        self._meta = _metadata(model)
        self._begun = time.monotonic_ns()
        self._plan: Plan | None = None
        self._fed: dict[frozenset[str], Plan] = {}  # plans that read these initializers as inputs
        self._lock = threading.Lock()
        of_any_rank = any(not value.type.tensor_type.HasField("shape") for value in needed if _is_tensor(value.type))
        if not of_any_rank and all(isinstance(size, int) for one in self._inputs for size in one.shape):
            plan = self._compiled({one.name: tuple(one.shape) for one in self._inputs})
            self._outputs = [_completed(one, plan) for one in self._outputs]

    def __getstate__(self) -> dict[str, Any]:
        """Without plans, which hold the weights once more: the first run makes them again."""
        return self.__dict__ | {"_lock": None, "_plan": None, "_fed": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    # -- what the model is

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that a run needs."""
        return self._inputs

    def get_outputs(self) -> list[NodeArg]:
        """The outputs."""
        return self._outputs

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Initializers that are declared as inputs. A run may give other values of them."""
        return self._overridable

    def get_modelmeta(self) -> ModelMetadata:
        """The model's producer, names, version and own entries."""
        return self._meta

    def get_session_options(self) -> SessionOptions:
        """The options."""
        return self._options

    def get_providers(self) -> list[str]:
        """["CPUExecutionProvider"]."""
        return list(PROVIDERS)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """{provider: {}}."""
        return {name: {} for name in PROVIDERS}

    def set_providers(self, providers: Sequence[Any] | None = None, provider_options: Any = None) -> None:
        """Check the arguments, whose types raise ValueError. Other providers than CPUExecutionProvider warn."""
        _check_providers(providers, provider_options)

    def enable_fallback(self) -> None:
        """Do nothing: there is one provider."""

    disable_fallback = enable_fallback

    @property
    def plan(self) -> Plan | None:
        """The plan, for `explain` and `report`. None before the first run of a copy, or with symbolic dimensions."""
        return self._plan

    # -- running

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Array]:
        """The outputs of these names, or all for None or an empty list, as row-major arrays.

        input_feed: {input: array}. Types and shapes have to be the model's. The first run that gives a value for an
            initializer plans for it.

        Raises ValueError for a missing input, RuntimeError for a value that is no array, InvalidArgument for other
        names, types or shapes, and Fail for an error inside the network, or if `run_options.terminate` is set.
        """
        if run_options is not None:
            if not isinstance(run_options, RunOptions):
                raise TypeError(f"run_options={run_options!r}: has to be a blockconv.onnxruntime.RunOptions")
            if run_options.terminate:
                raise Fail("Exiting due to terminate flag being set to true.")
        given = input_feed.keys()  # anything but a mapping raises ONNX Runtime's error
        missing = [name for name in self._required if name not in given]
        if missing:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({list(input_feed)}).")
        wanted = [*(output_names or ())] or self._results
        if isinstance(output_names, str | bytes) or not all(isinstance(name, str) for name in wanted):
            raise TypeError(f"output_names={output_names!r}: has to be a list of names")
        for name in wanted:
            if name not in self._results:
                raise InvalidArgument(f"Invalid output name:{name}")
        declared, fed = self._declared, frozenset[str]()
        if not given <= declared.keys():
            known, fed = {one.name: one for one in self._overridable}, frozenset(given - declared.keys())
            for name in given:
                if name not in declared and name not in known:
                    raise InvalidArgument(f"Invalid input name: {name}")
            declared = declared | {name: known[name] for name in fed}
        feeds = {}
        for name, declaration in declared.items():
            x = input_feed.get(name)
            if type(x) is not np.ndarray or (x.shape, x.dtype) != self._passed.get(name):
                x = _checked(declaration, x)
                if type(x) is np.ndarray:
                    self._passed[name] = x.shape, x.dtype
            feeds[name] = x
        try:
            plan = self._plan if not fed else self._fed.get(fed)
            if plan is None:
                plan = self._compiled({name: x.shape for name, x in feeds.items() if type(x) is np.ndarray}, fed)
            values = plan.by_name(**feeds)
        except NetworkError as error:  # the graph runs, but not on these elements
            raise InvalidArgument(str(error)) from error
        except BlockconvError as error:
            raise _as_theirs(error) from error
        return [values[name] for name in wanted]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Array], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """`run` in a thread, which then calls `callback(outputs, user_data, error)`. Outputs or error are empty."""
        if not callable(callback):
            raise TypeError(f"run_async: callback={callback!r}: has to be a function of outputs, user_data and error")

        def work() -> None:
            try:
                found, said = self.run(output_names, input_feed, run_options), ""
            except Exception as error:
                found, said = [], str(error)
            callback(found, user_data, said)

        threading.Thread(target=work).start()

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """`run` with values of `OrtValue` in place of arrays."""
        feeds = {name: value.numpy() for name, value in input_dict_ort_values.items()}
        return list(map(OrtValue, self.run(output_names, feeds, run_options)))

    def end_profiling(self) -> str:
        """ "": blockconv writes no file of a profile. `session.plan.profile` measures."""
        return ""

    def get_profiling_start_time_ns(self) -> int:
        """When the session was made, by `time.monotonic_ns`."""
        return self._begun

    def create_ortvalue_from_shape_and_type(
        self, shape: Iterable[int], element_type: Any, device_type: str, device_id: int = 0
    ) -> OrtValue:
        """As `OrtValue.ortvalue_from_shape_and_type`."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id)

    def io_binding(self) -> IOBinding:
        """A binding for this session."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run a binding of this session. Raises ValueError for another session's binding."""
        if iobinding._session is not self:
            raise ValueError("IOBinding must be used with the session that created it.")
        iobinding.run(run_options)

    def _compiled(self, shapes: Mapping[str, tuple[Any, ...]], fed: frozenset[str] = frozenset()) -> Plan:
        """The plan that reads `fed` as inputs, which the first call makes for these shapes of the inputs."""
        with self._lock:
            plan = self._fed.get(fed)
            if plan is None:
                threads = min(max(0, self._options.intra_op_num_threads), target.affinity()) or None
                try:
                    plan = compile(self._network_of(dict(shapes), fed=fed), threads=threads)
                except BlockconvError as error:
                    raise _as_theirs(error) from error
                self._fed[fed] = plan
                self._plan = self._fed.get(frozenset())
            return plan


class IOBinding:
    """Inputs and outputs of a session that stay bound from run to run. `InferenceSession.io_binding` makes it."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, Array] = {}
        self._outputs: dict[str, Array | None] = {}  # None: memory of its own at each run
        self._results: dict[str, OrtValue] = {}

    def bind_cpu_input(self, name: str, array: Array) -> None:
        """Bind an input to an array. Raises RuntimeError for what is no array."""
        if not isinstance(array, np.ndarray):
            raise RuntimeError(f"bind_cpu_input: array={array!r}: has to be a NumPy array")
        self.bind_ortvalue_input(name, OrtValue(array))

    def bind_ortvalue_input(self, name: str, value: OrtValue) -> None:
        """Bind an input to a value."""
        self._inputs[self._known(name, self._session.get_inputs())] = value.numpy()

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Iterable[int], buffer_ptr: int
    ) -> None:
        """Bind an input to memory at an address."""
        check_device(device_type, device_id)
        self.bind_cpu_input(name, array_at(buffer_ptr, shape, element_type))

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Iterable[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output: to memory at an address, or to new memory at each run."""
        check_device(device_type, device_id)
        known = self._known(name, self._session.get_outputs())
        if buffer_ptr is not None and (element_type is None or shape is None):
            raise ValueError(f"bind_output: output {name!r} at an address needs its element_type and shape")
        self._outputs[known] = None if buffer_ptr is None else array_at(buffer_ptr, shape or (), element_type)

    def bind_ortvalue_output(self, name: str, value: OrtValue) -> None:
        """Bind an output to a value, whose memory a run writes."""
        self._outputs[self._known(name, self._session.get_outputs())] = value.numpy()

    def run(self, run_options: RunOptions | None = None) -> None:
        """Run the session on what is bound."""
        names = list(self._outputs)
        found = self._session.run(names, self._inputs, run_options) if names else []
        given = [*zipped(self._outputs.items(), found)]
        for (name, wanted), result in given:
            if wanted is not None and (wanted.shape, wanted.dtype) != (result.shape, result.dtype):
                rule = f"is bound to {wanted.dtype} {wanted.shape}, and the model gives {result.dtype} {result.shape}"
                raise InvalidArgument(f"output {name!r} {rule}")
        for (name, wanted), result in given:
            if wanted is not None:
                np.copyto(wanted, result)
            self._results[name] = OrtValue(result if wanted is None else wanted)

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run, in the order of their binding."""
        return [self._results[name] for name in self._outputs if name in self._results]

    def copy_outputs_to_cpu(self) -> list[Array]:
        """Copies of the outputs of the last run."""
        return [value.numpy().copy() for value in self.get_outputs()]

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self._outputs.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Do nothing: memory of the CPU is always up to date."""

    synchronize_outputs = synchronize_inputs

    @staticmethod
    def _known(name: str, declared: list[NodeArg]) -> str:
        if name not in [one.name for one in declared]:
            raise InvalidArgument(f"Failed to find NodeArg {name} in the session's inputs or outputs")
        return name


def _source(path_or_bytes: Any) -> str | bytes:
    if isinstance(path_or_bytes, (str, os.PathLike)):
        path = os.fspath(path_or_bytes)
        if not os.path.exists(path):
            raise NoSuchFile(f"Load model from {path} failed:Load model {path} failed. File doesn't exist")
        return os.path.abspath(path)
    if isinstance(path_or_bytes, (bytes, bytearray, memoryview)):
        return bytes(path_or_bytes)
    raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")


def _check_providers(providers: Any, options: Any = None) -> None:
    """Raise ValueError, as ONNX Runtime does, for providers or options of other types. Unknown providers warn."""
    if providers is None:
        return
    given = [*providers] if isinstance(providers, Sequence) else [None]
    pairs = [one if isinstance(one, tuple) and len(one) == 2 else (one, {}) for one in given]
    if not all(isinstance(name, str) and isinstance(held, dict) for name, held in pairs):
        raise ValueError(f"providers={providers!r}: has to be a sequence of names, or of (name, dict) tuples")
    if options is not None:
        fits = isinstance(options, Sequence) and all(isinstance(held, dict) for held in options)
        if not fits or len(options) != len(given) or not all(isinstance(one, str) for one in given):
            raise ValueError(f"provider_options={options!r}: has to be a sequence of a dict for each name in providers")
    for k, (name, _) in enumerate(pairs):
        if name in (earlier for earlier, _ in pairs[:k]):
            warn(f"Duplicate provider '{name}' encountered, ignoring.", 3, UserWarning)
        elif name not in PROVIDERS:
            rule = f"is not in available provider names. Available providers: '{', '.join(PROVIDERS)}'"
            warn(f"Specified provider '{name}' {rule}", 3, UserWarning)


def _is_tensor(type: Any) -> bool:
    return bool(type.HasField("tensor_type"))


def _argument(value: Any, options: SessionOptions) -> NodeArg:
    held = value.type.optional_type.elem_type if value.type.HasField("optional_type") else value.type
    shape: list[int | str | None] = []
    for dim in held.tensor_type.shape.dim if _is_tensor(held) else ():
        fixed = dim.HasField("dim_value") and dim.dim_value >= 0  # some exporters write -1 for any size
        size: int | str | None = dim.dim_value if fixed else dim.dim_param or None
        size = options.dimensions.get(dim.dim_param, size) if dim.dim_param else size
        shape.append(options.denotations.get(dim.denotation, size) if dim.denotation else size)
    return NodeArg(value.name, shape, type_text(value.type))


def _results(model: Any, options: SessionOptions) -> Iterator[NodeArg]:
    """The declarations of the outputs. As in ONNX Runtime, they have the sizes that ONNX infers."""
    known, small = without_weights(model), {t.name: t for t in model.graph.initializer if math.prod(t.dims) <= SMALL}
    for tensor in known.graph.initializer:
        tensor.CopyFrom(small.get(tensor.name, tensor))
    for value, found in zipped(model.graph.output, with_inferred(known).graph.output):
        declared, sizes = _argument(value, options), _argument(found, options).shape
        shape = [b if isinstance(b, int) else a for a, b in zip(declared.shape, sizes or declared.shape, strict=False)]
        yield NodeArg(declared.name, shape, declared.type)


def _completed(declared: NodeArg, plan: Plan) -> NodeArg:
    """The declaration of an output, with the type and shape that a model does not say."""
    tensor = plan.network.tensors.get(declared.name)
    if tensor is None or (declared.type and declared.shape):
        return declared
    return NodeArg(declared.name, list(tensor.shape), declared.type or type_name(tensor.type.dtype))


def _metadata(model: Any) -> ModelMetadata:
    entries = {entry.key: entry.value for entry in model.metadata_props}
    return ModelMetadata(
        model.producer_name,
        model.graph.name,
        model.domain,
        model.doc_string,
        model.graph.doc_string,
        model.model_version if model.HasField("model_version") else ModelMetadata.version,
        entries,
    )


def _checked(declared: NodeArg, value: Any) -> Any:
    """The array of an input, checked against the declared type and shape. Lists become arrays of that type."""
    if isinstance(value, OrtValue):
        value = value.numpy()
    if not declared.type.startswith("tensor("):  # the library that runs its nodes checks it
        return value
    if isinstance(value, (list, tuple)):
        try:
            value = np.array(value, dtype=dtype_named(declared.type))
        except (ValueError, TypeError, OverflowError) as error:
            raise RuntimeError(f"Could not create tensor from given input list {declared.name!r}: {error}") from error
    if not isinstance(value, np.ndarray):
        needed = f"input {declared.name!r} needs an array for {declared.type}"
        raise RuntimeError(f"Unable to handle object of type {type(value)}: {needed}")
    if type_name(value.dtype) != declared.type:
        raise InvalidArgument(
            f"Unexpected input data type. Actual: ({type_name(value.dtype)}) , expected: ({declared.type})"
        )
    if declared.shape and value.ndim != len(declared.shape):
        ranks = f"Got: {value.ndim} Expected: {len(declared.shape)}"
        raise InvalidArgument(f"Invalid rank for input: {declared.name} {ranks} {FIX}")
    wrong = [
        f" index: {axis} Got: {size} Expected: {wanted}"
        for axis, (size, wanted) in enumerate(zip(value.shape, declared.shape, strict=False))
        if isinstance(wanted, int) and size != wanted
    ]
    if wrong:
        told = "\n".join(wrong)
        raise InvalidArgument(
            f"Got invalid dimensions for input: {declared.name} for the following indices\n{told}\n {FIX}"
        )
    return value


def _as_theirs(error: BlockconvError) -> Fail:
    """ONNX Runtime's exception for one of blockconv's."""
    if isinstance(error, NetworkError) and error.argument == "model":  # the file cannot be read
        return InvalidProtobuf(f"Failed to load model because protobuf parsing failed: {error}")
    kinds: dict[type, type[Fail]] = {
        UnsupportedError: NotImplemented,
        NetworkError: InvalidGraph,
        ArgumentError: InvalidArgument,
    }
    found = next((kinds[kind] for kind in type(error).__mro__ if kind in kinds), Fail)
    return found(str(error))
