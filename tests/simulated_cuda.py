"""A pretend CUDA device for machines without one: true numbers, computed on the CPU, under CUDA's
rules about devices and generators. It also counts where the host waits for the device.

    python tests/simulated_cuda.py grpo --max-steps 2     # a script of algorithms/ with its flags

A DeviceTensor wraps a CPU tensor and says that it is on cuda:0. A TorchDispatchMode sees every operation below autograd
and autocast, and refuses what CUDA refuses: CPU and device tensors in one operation (see check_devices), .numpy(),
generators of the other device, matrix products of integers. Memory that was not written to holds garbage. A wait is
what makes the host stop until the device has done all its work: .item(), bool(), shapes that depend on values (nonzero,
boolean masks), and copies from one device to the other.

A CUDA graph is recorded as the list of its operations and replayed one by one: nothing is computed while it is
recorded, and whatever would wait, or has a shape that depends on values, ends the recording with an error.

A run that passes shows nothing about speed, memory, rounding and missing dtypes of CUDA's kernels, fused attention (the
plain one runs instead), torch.compile, NCCL, FSDP, or several GPUs. Needs a CPU build of torch and a C++ compiler. It
cannot be uninstalled, so it wants a process of its own.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ROOT = str(Path(__file__).resolve().parents[1])
SOURCE = Path(__file__).with_suffix(".cpp")
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
KINDS = {  # operations with rules of their own; those of `value` need one on the host, or its size
    "copy": "copy_ copy _to_copy _foreach_copy_",
    "index": "index index_put index_put_ _index_put_impl_ _unsafe_index",
    "number": "fill fill_ masked_fill masked_fill_",
    "empty": "empty empty_like empty_strided new_empty new_empty_strided",
    "matrix": "mm bmm addmm baddbmm mv addmv dot",
    "value": "_local_scalar_dense equal multinomial bincount nonzero masked_select _unique2 "
    "unique_dim unique_consecutive",
    "repeat": "repeat_interleave",
}


# --- Waits ----------------------------------------------------------------------------------------

sync_debug_mode = ["default"]
waits_of_lines = Counter()  # lines of the repository
waits_of_functions = {}  # name: number in each call, without those of the functions that it calls
running = []  # numbers in the calls that have not ended, the innermost last


def watch(script) -> None:
    """Count the waits of every function of a module."""
    for name, function in vars(script).copy().items():
        if inspect.isfunction(function) and function.__module__ == script.__name__:
            setattr(script, name, watched(name, function))


def watched(name: str, function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        running.append(0)
        try:
            return function(*args, **kwargs)
        finally:
            waits_of_functions.setdefault(name, []).append(running.pop())

    return call


def count_wait(kind: str) -> None:
    """Add one to the function and to the line of the repository that runs."""
    if running:
        running[-1] += 1
    frame = sys._getframe()
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and path != __file__:
            line = f"{os.path.relpath(path, ROOT)}:{frame.f_lineno}"
            waits_of_lines[f"{line} {kind}"] += 1
            return
        frame = frame.f_back


def print_waits() -> None:
    """By function, with the number in the call with most of them, and by line."""
    print(f"{'function':24} {'calls':>6} {'waits':>6} {'most':>6}")
    for name, waits in waits_of_functions.items():
        print(f"{name:24} {len(waits):6} {sum(waits):6} {max(waits):6}")
    print()
    for line, number in waits_of_lines.most_common():
        print(f"{number:6}  {line}")


# --- Tensors and generators -----------------------------------------------------------------------


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on cuda:0; `elem` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype, device=CUDA
        )
        self.elem = elem
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_operation(func, args, kwargs or {})

    def __tensor_flatten__(self):
        """Module.to changes tensors that have these two methods in place, as it does on CUDA."""
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return DeviceTensor(inner["elem"])

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.elem = other.elem

    def __reduce_ex__(self, protocol):
        """torch.save writes it as a CPU tensor."""
        return self.elem.detach().__reduce_ex__(protocol)

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self):
        return self.cpu().tolist()


class DeviceGenerator(torch._C.Generator):
    """torch.Generator("cuda"), which draws what a CPU generator with its seed draws.

    The state is a seed and the number of draws, 16 bytes; that of a CPU generator has 5056.
    """

    device = CUDA
    known = {}  # torch hands a copy of a generator to the mode, with the same _cdata

    def __new__(cls):
        return torch._C.Generator.__new__(cls)

    def __init__(self):
        self.known[self._cdata] = self
        self.states = {}  # of the CPU generator that it is
        self.manual_seed(self.initial_seed())

    def manual_seed(self, seed: int):
        super().manual_seed(seed)
        self.seed_and_draws = [self.initial_seed(), 0]
        return self

    def get_state(self) -> torch.Tensor:
        self.states[tuple(self.seed_and_draws)] = super().get_state()
        return torch.tensor(self.seed_and_draws).view(torch.uint8)

    def set_state(self, state: torch.Tensor):
        if state.device != CPU or state.numel() != 16:
            raise RuntimeError("RNG state is wrong size, or not on the CPU")
        self.seed_and_draws = state.view(torch.int64).tolist()
        super().set_state(self.states[tuple(self.seed_and_draws)])
        return self

    def draw(self, operation):
        """Run an operation that uses the default generator of the CPU."""
        default = torch.default_generator
        before = default.get_state()
        default.set_state(super().get_state())
        result = operation()
        super().set_state(default.get_state())
        default.set_state(before)
        self.seed_and_draws[1] += 1
        return result


def make_generator(device="cpu"):
    """torch.Generator(device)"""
    return DeviceGenerator() if torch.device(device).type == "cuda" else torch._C.Generator(device)


# --- Operations -----------------------------------------------------------------------------------


class SimulatedCuda(TorchDispatchMode):
    """Sees the operations without a device tensor, too, such as torch.zeros(2, device="cuda")."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the next method, which takes time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # in inference mode torch does not take linear, to and others apart
                return func.decompose(*args, **kwargs or {})
        return run_operation(func, args, kwargs or {})


def run_operation(func, args, kwargs):
    """Compute on the CPU what CUDA would compute, and wrap the result."""
    tensors = [x for x in flat([*args, *kwargs.values()]) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, DeviceTensor)]
    others = [x for x in tensors if not isinstance(x, DeviceTensor)]
    device = kwargs.get("device") or (CUDA if ours else CPU)
    kinds = kinds_of(func)
    if "random" in kinds:
        generator = find_generator(kwargs.get("generator"), device)
    if not ours and device.type == "cpu":
        return func(*args, **kwargs)

    if ours and others and "copy" not in kinds:
        check_devices(func, args, kwargs, others)
    if "matrix" in kinds and not (ours[0].is_floating_point() or ours[0].is_complex()):
        raise RuntimeError(f"{func} is not implemented for {ours[0].dtype} on cuda")
    to_cpu = device.type == "cpu"
    if "copy" in kinds and func._schema.is_mutable:  # into the first argument
        to_cpu = not isinstance(flat(args)[0], DeviceTensor)
    if kinds:
        kind = kind_of_wait(kinds, args, kwargs, others, to_cpu)
        if kind and Graph.recording:
            raise RuntimeError(f"operation not permitted when stream is capturing ({func}, {kind})")
        if kind and sync_debug_mode == ["error"]:
            raise RuntimeError(f"called a synchronizing CUDA operation ({func}, {kind})")
        if kind:
            count_wait(kind)
    if Graph.recording:
        Graph.recording.save(func, args, kwargs)

    changed = {"device": CPU, "generator": None, "pin_memory": None}
    real_args = each(on_cpu, args)
    real_kwargs = {name: changed.get(name, each(on_cpu, x)) for name, x in kwargs.items()}
    name = func.overloadpacket.__name__
    operation = functools.partial(ONLY_ON_CUDA.get(name, func), *real_args, **real_kwargs)
    result = generator.draw(operation) if "random" in kinds else operation()
    if "reshape" in kinds:  # the wrapper, too
        with no_dispatch():
            func(*args, **kwargs)
    if to_cpu:
        return result
    if "empty" in kinds:
        result.fill_(garbage(result.dtype))
    wrappers = {id(x.elem): x for x in ours}  # what is changed in place is returned itself

    def on_device(x):
        if not isinstance(x, torch.Tensor):
            return x
        return wrappers[id(x)] if id(x) in wrappers else DeviceTensor(x)

    result = each(on_device, result)
    if Graph.recording:
        Graph.recording.operations.append((func, args, kwargs, result))
    return result


def gru_cell(inputs, hidden, state, input_bias, hidden_bias):
    """aten::_thnn_fused_gru_cell: gates (B,3D) -> new state (B,D), and what its backward needs."""
    in_reset, in_update, in_new = (inputs + input_bias).chunk(3, 1)
    reset, update, new = (hidden + hidden_bias).chunk(3, 1)
    r, z = (in_reset + reset).sigmoid(), (in_update + update).sigmoid()
    n = (in_new + r * new).tanh()
    return n + z * (state - n), torch.cat([r, z, n, state, new], 1)


def gru_cell_backward(grad, workspace, has_bias):
    """Gradients of gates, state and biases."""
    r, z, n, state, new = workspace.chunk(5, 1)
    of_n = grad * (1 - z) * (1 - n * n)
    of_r, of_z = of_n * new * r * (1 - r), grad * (state - n) * z * (1 - z)
    inputs, hidden = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    return inputs, hidden, grad * z, inputs.sum(0), hidden.sum(0)


# CPUs take these apart.
ONLY_ON_CUDA = {"_thnn_fused_gru_cell": gru_cell, "_thnn_fused_gru_cell_backward": gru_cell_backward}


@functools.cache
def kinds_of(func) -> set[str]:
    """Which rules apply to an operation."""
    name = func.overloadpacket.__name__
    kinds = {kind for kind, names in KINDS.items() if name in names.split()}
    tags = {"number": torch.Tag.pointwise, "random": torch.Tag.nondeterministic_seeded}
    tags |= {"reshape": torch.Tag.inplace_view}
    return kinds | {kind for kind, tag in tags.items() if tag in func.tags}


def flat(things) -> list:
    """Arguments of an operation, without the lists in which some of them are."""
    found = []
    for x in things:
        if isinstance(x, (list, tuple)):
            found += flat(x)
        else:
            found.append(x)
    return found


def each(function, x):
    """The function's result for an argument, or for each thing in a list of them."""
    if isinstance(x, (list, tuple)):
        return type(x)([each(function, y) for y in x])
    return function(x)


def on_cpu(x):
    return x.elem if isinstance(x, DeviceTensor) else x


def garbage(dtype: torch.dtype):
    """What is in memory that nobody has written to."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 77


def find_generator(generator, device):
    """The one that was given to a random operation, else the default one of the device."""
    default = torch.cuda.default_generators[0]
    if generator is None:
        return default
    generator = default.known.get(generator._cdata, generator)
    if generator.device.type != device.type:
        found = f"'{device.type}' device type for generator but found '{generator.device.type}'"
        raise RuntimeError(f"Expected a {found}")
    return generator


def check_devices(func, args, kwargs, others) -> None:
    """An operation on device tensors takes a CPU tensor only to read it, and only as indices of a
    device tensor, or as the single number of a pointwise operation."""
    kinds = kinds_of(func)
    taken = "number" in kinds and len(others) == 1 and others[0].dim() == 0
    if "index" in kinds:  # of x[indices], or of x[indices] = y
        taken = all(isinstance(x, DeviceTensor) or x.dim() == 0 for x in [args[0], *args[2:3]])
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            if any(x is other for x in flat([written]) for other in others):
                taken = False
    if not taken:
        found = f"but found at least two devices, cuda:0 and cpu! ({func})"
        raise RuntimeError(f"Expected all tensors to be on the same device, {found}")


def kind_of_wait(kinds, args, kwargs, others, to_cpu: bool) -> str | None:
    """Why the host waits, if it does."""
    if "value" in kinds or "repeat" in kinds and kwargs.get("output_size") is None:
        return "value"
    if "index" in kinds and any(is_mask(x) for x in args[1]):
        fills = len(args[1]) == 1 and len(args) > 2 and args[2].numel() == 1
        if fills and not isinstance(args[2], DeviceTensor):
            return None  # x[mask] = 1.0 becomes masked_fill
        return "boolean mask"
    blocks = "copy" in kinds and not kwargs.get("non_blocking") and args[2:3] != (True,)
    if blocks and to_cpu:
        return "copy to the CPU"
    if (blocks or "index" in kinds) and others and others[0].numel() > 0:
        return "copy to the device"
    return None


def is_mask(x) -> bool:
    return x is not None and x.dtype in (torch.bool, torch.uint8)


# --- CUDA graphs ----------------------------------------------------------------------------------


class Graph:
    """torch.cuda.CUDAGraph"""

    recording = None  # the one that is being recorded

    def __init__(self):
        self.operations = []  # (function, arguments, named arguments, result)
        self.before = []  # tensors that the recording changes, and what was in them

    def save(self, func, args, kwargs) -> None:
        """Keep what an operation in place will overwrite: on CUDA it would not run now."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                self.before += [(x, x.elem.clone()) for x in flat([written]) if isinstance(x, DeviceTensor)]

    def replay(self) -> None:
        """Compute everything anew, from what is now in the tensors, into the same tensors."""
        for func, args, kwargs, result in self.operations:
            if func.is_view:
                continue
            for old, new in zip(flat([result]), flat([func(*args, **kwargs)])):
                if isinstance(old, DeviceTensor) and old is not new:
                    old.elem.copy_(new.elem)


@contextlib.contextmanager
def record(graph: Graph, **_):
    """torch.cuda.graph"""
    Graph.recording = graph
    try:
        yield
    finally:
        Graph.recording = None
        for tensor, values in reversed(graph.before):
            tensor.elem.copy_(values)
        graph.before.clear()


# --- Making torch believe in it -------------------------------------------------------------------


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build_library() -> Path:
    """simulated_cuda.cpp as a library, built once for each version of it and of torch."""
    torch_folder = Path(torch.__file__).parent
    version = f"{torch_folder} {torch.__version__} {SOURCE.read_text()}"
    name = f"simulated_cuda_{hashlib.sha256(version.encode()).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir(), name)
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder, name)
            command = [compiler(), "-std=c++20", "-shared", "-fPIC", SOURCE, "-o", built]
            command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
            subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
            os.replace(built, library)  # another process may build it at the same time
    return library


def install() -> None:
    """Make torch believe in one GPU, from here to the end of the process."""
    importlib.import_module("torch._dynamo")  # asks for the GPU when it is imported: not for ours
    importlib.import_module("transformers.modeling_utils")  # names torch.Generator as a type
    ctypes.CDLL(str(build_library()), ctypes.RTLD_GLOBAL)
    torch.autograd.set_multithreading_enabled(False)  # backward in this thread, to know its line
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(list, device="cuda") is a copy
    torch.utils._device._device_constructors()  # remembers torch.tensor, which is replaced below
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        sys.modules[module]._foreach_supported_types.append(DeviceTensor)
    replace_cuda_functions()
    torch.Generator = make_generator
    torch.tensor = functools.partial(make_tensor, torch.tensor)
    torch.load = functools.partial(load, torch.load)
    SimulatedCuda().__enter__()


def replace_cuda_functions() -> None:
    """Those of torch.cuda that are called without a tensor."""
    values = {"is_available": True, "is_initialized": True, "is_bf16_supported": True}
    values |= {"device_count": 1, "current_device": 0, "get_device_capability": (9, 0)}
    values |= {"_exchange_device": 0, "_maybe_exchange_device": 0, "_is_in_bad_fork": False}
    values |= {"memory_allocated": 0, "max_memory_allocated": 0}
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    values |= {"current_stream": stream, "Stream": stream, "stream": contextlib.nullcontext()}
    nothing = "init _lazy_init _lazy_call set_device synchronize empty_cache"
    values |= dict.fromkeys([*nothing.split(), "reset_peak_memory_stats"])
    for name, value in values.items():
        setattr(torch.cuda, name, functools.partial(returns, value))

    torch.cuda.set_sync_debug_mode = lambda mode: sync_debug_mode.__setitem__(0, mode)
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = record
    generator = DeviceGenerator()
    torch.cuda.default_generators = (generator,)
    torch.cuda.manual_seed = generator.manual_seed
    torch.cuda.manual_seed_all = generator.manual_seed
    torch.cuda.get_rng_state = lambda device=0: generator.get_state()
    torch.cuda.set_rng_state = lambda state, device=0: generator.set_state(state)


def returns(value, *_, **__):
    """A function that always returns this."""
    return value


def make_tensor(original, data, **options) -> torch.Tensor:
    """torch.tensor; for device tensors in a list it calls .item(), which the mode does not see."""
    if not isinstance(data, torch.Tensor):
        data = tree_map_only(DeviceTensor, DeviceTensor.item, data)
    return original(data, **options)


def load(original, file, map_location="cpu", **options):
    """torch.load; it moves storages, but those of the device are on the CPU."""
    content = original(file, map_location="cpu", **options)
    return tree_map_only(torch.Tensor, lambda x: x.to(map_location), content)


def run(name: str) -> None:
    """Run a script of algorithms/ with the words of sys.argv, and print what waited."""
    sys.path.insert(0, ROOT)
    install()
    script = importlib.import_module(f"algorithms.{name}")
    watch(script)
    script.train(script.parse_args())
    print_waits()


if __name__ == "__main__":
    run(sys.argv.pop(1))
    sys.stdout.flush()
    os._exit(0)  # to take all modules down takes as long as many a run of a test
