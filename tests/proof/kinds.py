"""What user code keeps state in: each kind as the source text that makes, reads and changes it.

A state is a small number, 1 or more in health and 0 at the fault. In the texts, ``{s}`` is the attribute it lives in,
``{o}`` the module that has the attribute, ``{n}`` an expression for the number. A *stream* is another thing at each
read: there the number says how many reads there are before the one that gives 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BEFORE_FIT = frozenset({"saved argument", "ignored argument", "script"})
"""By the constructor or the script."""
HOOKS = frozenset({"setup", "configure_model", "on_fit_start", "on_train_start"})
RESUMED = "checkpoint"
DURING_FIT = frozenset({"callback", "callback after a step", "step", "optimizer hook", "forward", "countdown"})
ALWAYS = BEFORE_FIT | HOOKS | DURING_FIT | {RESUMED}
NOT_LOADED = ALWAYS - {RESUMED}
"""Of what a checkpoint holds anyway, and loads after the hook."""
LATE = ALWAYS - {"saved argument", "ignored argument", "countdown"}
WITH_TRAINER = DURING_FIT - {"forward", "countdown"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to keep a number.

    Attributes:
        make: an expression that makes it anew.
        get: an expression that reads it, a number or a tensor of one element.
        put: a statement that changes it where it is; empty where it can only be made anew.
        anew: a statement that makes it anew, where that is no assignment of `make` to the attribute.
        top: source for the top of the module.
        comparable: whether what the constructor makes can be told to be equal to what it makes once more.
        written: whether a bundle can hold it, as far as can be asked for; else it must be named as missing, or nothing
            be claimed.
        named: whether a bundle that lacks it can say where it is.
        most: the largest number that can be kept.
        whens: when it can be set.
        stream: see above.
        outside: it is no part of the module: nothing but a process of its own can tell that a bundle lacks it.
        root: it can belong to the LightningModule only.
    """

    make: str = ""
    get: str
    put: str = ""
    anew: str = ""
    top: str = ""
    written: bool = True
    comparable: bool = True
    named: bool = True
    most: int = 9
    whens: frozenset[str] = ALWAYS
    stream: bool = False
    outside: bool = False
    root: bool = False

    @property
    def healthy(self) -> int:
        return self.most if self.stream else 1


def stream(make: str, get: str, put: str = "", *, seeded: str = "", top: str = "", written: bool = True) -> Kind:
    """Of random numbers from 0 to 4. `seeded`: an expression that makes the source of them from a seed ``k``."""
    if seeded:
        name = "seed_of_" + re.sub(r"\W+", "_", seeded.partition("(k")[0])
        make, put = (text.replace("seed_of", name) for text in (make, put))
        read = get.format(s="made")
        top = (
            f"def {name}(n):\n    for k in itertools.count():\n        made = {seeded}\n"
            f"        if [{read} == 0 for _ in range(n + 1)] == [False] * n + [True]:\n            return k"
        )
    return Kind(make=make, get=get, put=put, top=top, written=written, comparable=seeded != "", stream=True)


_PLAIN = {
    "float": Kind(make="float({n})", get="{s}"),
    "int": Kind(make="int({n})", get="{s}"),
    "string": Kind(make="str({n})", get="int({s})"),
    "bool": Kind(make="bool({n})", get="float({s})", most=1),
    "none": Kind(make="({n}) or None", get="{s} or 0"),
    "enum": Kind(make="Level({n})", get="{s}.value", top='Level = enum.Enum("Level", {f"L{i}": i for i in range(10)})'),
    "complex": Kind(make="complex({n}, 2)", get="{s}.real"),
    "path": Kind(make="pathlib.Path(str({n}))", get="int({s}.name)"),
    "dtype": Kind(make="(torch.float64 if {n} else torch.int8)", get="float({s}.is_floating_point)", most=1),
    "private": Kind(
        anew="{o}._Keeps__level = {n}",
        get="{o}.get_level()",
        top="class Keeps:\n    def get_level(self):\n        return self.__level",
    ),
    "behind a property": Kind(
        anew="{o}.level = {n}",
        get="{o}.level",
        top="class Keeps:\n    @property\n    def level(self):\n        return self._level\n\n"
        "    @level.setter\n    def level(self, value):\n        self._level = value",
    ),
    "cached property": Kind(
        anew='{o}.source = {n}; vars({o}).pop("level", None); {o}.level; {o}.source = 1',
        get="{o}.level",
        top="class Keeps:\n    @functools.cached_property\n    def level(self):\n        return float(self.source)",
        written=False,
    ),
}
_CONTAINERS = {
    "list": Kind(make="[{n}, 7]", get="{s}[0]", put="{s}[0] = {n}"),
    "dict": Kind(make='{{"a": {n}, "b": 7}}', get='{s}["a"]', put='{s}["a"] = {n}'),
    "dict with numbers as keys": Kind(make="{{7: 5, (1, 2): {n}}}", get="{s}[1, 2]", put="{s}[1, 2] = {n}"),
    "dict of lists": Kind(make='{{"a": {{"b": [3, {n}]}}}}', get='{s}["a"]["b"][1]', put='{s}["a"]["b"][1] = {n}'),
    "growing list": Kind(make="[1] * ({n})", get="len({s})", put="{s}[:] = [1] * ({n})"),
    "set": Kind(make="{{50, {n}}}", get="min({s})", put="level = {n}; {s}.clear(); {s}.update([50, level])"),
    "tuple": Kind(make="({n}, 7)", get="{s}[0]"),
    "list in a tuple": Kind(make="([{n}], 7)", get="{s}[0][0]", put="{s}[0][0] = {n}"),
    "deque": Kind(make="collections.deque([7, {n}], maxlen=2)", get="{s}[-1]", put="{s}.append({n})"),
    "namedtuple": Kind(
        make="Pair({n}, 7)", get="{s}.first", top='Pair = collections.namedtuple("Pair", ["first", "second"])'
    ),
    "defaultdict": Kind(make="collections.defaultdict(int, a={n})", get='{s}["a"]', put='{s}["a"] = {n}'),
    "ordered dict": Kind(make="collections.OrderedDict(a={n})", get='{s}["a"]', put='{s}["a"] = {n}'),
    "counter": Kind(make="collections.Counter(a={n})", get='{s}["a"]', put='{s}["a"] = {n}'),
}
_BOX = "class Box:\n    def __init__(self, level):\n        self.level = level"
_OBJECTS = {
    "object": Kind(make="Box({n})", get="{s}.level", put="{s}.level = {n}", top=_BOX),
    "objects in objects": Kind(
        make="Box(Box(Box({n})))", get="{s}.level.level.level", put="{s}.level.level.level = {n}", top=_BOX
    ),
    "object in a list in a dict": Kind(
        make='{{"a": [Box({n})]}}', get='{s}["a"][0].level', put='{s}["a"][0].level = {n}', top=_BOX
    ),
    "dataclass": Kind(
        make="Settings({n})",
        get="{s}.level",
        put="{s}.level = {n}",
        top='@dataclasses.dataclass\nclass Settings:\n    level: float\n    name: str = "a"',
    ),
    "frozen dataclass": Kind(
        make="Frozen({n})",
        get="{s}.level",
        top="@dataclasses.dataclass(frozen=True)\nclass Frozen:\n    level: float",
    ),
    "slots": Kind(
        make="Slotted({n})",
        get="{s}.level",
        put="{s}.level = {n}",
        top='class Slotted:\n    __slots__ = ("level",)\n\n    def __init__(self, level):\n        self.level = level',
    ),
    "namespace": Kind(make="types.SimpleNamespace(a={n})", get="{s}.a", put="{s}.a = {n}"),
    "dict subclass": Kind(
        make="Table(a={n})", get='{s}["a"]', put='{s}["a"] = {n}', top="class Table(dict):\n    pass"
    ),
    "two names of one list": Kind(get="{s}[0]", anew="{o}.alias = {s} = [{n}]", put="{o}.alias[0] = {n}"),
    "object that refers back": Kind(
        make="Child({o}, {n})",
        get="{s}.level",
        put="{s}.level = {n}",
        top="class Child:\n    def __init__(self, parent, level):\n        self.parent, self.level = parent, level",
    ),
    "partial": Kind(make="functools.partial(int, {n})", get="{s}()"),
}
_ALMOST_EQUAL = {
    "sign of zero": Kind(make="(0.0 if {n} else -0.0)", get="float(math.copysign(1, {s}) > 0)", most=1),
    "type of a number": Kind(make="(1 if {n} else True)", get="float(type({s}) is int)", most=1),
    "order of a dict": Kind(
        make='({{"a": 1, "b": 0}} if {n} else {{"b": 0, "a": 1}})',
        get="next(iter({s}.values()))",
        put='({s}.update(b={s}.pop("b")) if {n} else {s}.update(a={s}.pop("a")))',
        most=1,
    ),
    "longest of a deque": Kind(make="collections.deque([7], maxlen=int({n}) + 1)", get="{s}.maxlen - 1"),
    "default of a defaultdict": Kind(
        make="collections.defaultdict(bool if {n} else int)",
        get="float({s}.default_factory is bool)",
        put="{s}.default_factory = bool if {n} else int",
        most=1,
    ),
    "dtype of a tensor": Kind(
        make="torch.ones(2, dtype=torch.float64 if {n} else torch.float32)",
        get="float({s}.dtype is torch.float64)",
        most=1,
    ),
    "dtype of an array": Kind(
        make="np.ones(2, np.float64 if {n} else np.float32)", get="float({s}.dtype == np.float64)", most=1
    ),
    "gradient of a tensor": Kind(
        make="torch.ones(2, requires_grad=bool({n}))",
        get="float({s}.requires_grad)",
        put="{s}.requires_grad_(bool({n}))",
        most=1,
    ),
    "list or tuple": Kind(make="([1] if {n} else (1,))", get="float(isinstance({s}, list))", most=1),
    "whether two are one": Kind(
        anew="{o}.twin = [1]; {s} = [1] if {n} else {o}.twin",
        get="float({s} is not {o}.twin)",
        written=False,
        named=False,
        most=1,
    ),
    "whether it is there": Kind(
        anew="vars({o}).update({name}=1) if {n} else vars({o}).pop({name!r})",
        get="float(hasattr({o}, {name!r}))",
        written=False,
        most=1,
        whens=LATE,
    ),
    "whether a key is there": Kind(
        make='({{"a": 1, "b": 2}} if {n} else {{"b": 2}})',
        get='float("a" in {s})',
        put='{s}.update(a=1) if {n} else {s}.pop("a")',
        most=1,
    ),
    "new attribute": Kind(get="getattr({o}, {name!r}, 1)", put="{s} = {n}", whens=LATE),
    "new buffer": Kind(
        get="getattr({o}, {name!r}, torch.ones(()))",
        put="{o}.register_buffer({name!r}, torch.tensor(float({n})))",
        whens=LATE - {RESUMED},
    ),
}
_LARGE = {
    "long list": Kind(make="[1.0] * 20_000 + [{n}]", get="{s}[-1]", put="{s}[-1] = {n}", written=False),
    "large dict": Kind(
        make="{{i: {n} for i in range(20_000)}}", get="{s}[19_999]", put="{s}[19_999] = {n}", written=False
    ),
    "deep list": Kind(
        make="[[[[[[[[[[[[{n}]]]]]]]]]]]]",
        get="{s}[0][0][0][0][0][0][0][0][0][0][0][0]",
        put="{s}[0][0][0][0][0][0][0][0][0][0][0][0] = {n}",
    ),
}
_OF_LIBRARIES = {
    "optimizer of one's own": Kind(
        make="torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float({n}))",
        get='{s}.param_groups[0]["lr"]',
        put='{s}.param_groups[0]["lr"] = float({n})',
        written=False,
    ),
    "distribution": Kind(make="torch.distributions.Normal(float({n}), 1.0)", get="{s}.loc", written=False),
    "dataset": Kind(
        make="torch.utils.data.TensorDataset(torch.tensor([float({n})]))",
        get="{s}[0][0]",
        put="{s}.tensors[0][0] = {n}",
        written=False,
    ),
    "logger": Kind(
        make="logger({n})",
        get="{s}.level",
        put="{s}.setLevel(int({n}))",
        top="def logger(level):\n    return logging.Logger('a', int(level))",
        written=False,
    ),
    "decimal": Kind(make="decimal.Decimal({n})", get="float({s})", written=False),
    "fraction": Kind(make="fractions.Fraction({n}, 1)", get="float({s})"),
    "time delta": Kind(make="datetime.timedelta(seconds=int({n}))", get="{s}.total_seconds()", written=False),
}
_ARRAYS = {
    "array": Kind(make="np.array([float({n}), 7])", get="{s}[0]", put="{s}[0] = {n}"),
    "numpy scalar": Kind(make="np.float32({n})", get="float({s})"),
    "tensor": Kind(make="torch.tensor([float({n}), 7])", get="{s}[0]", put="{s}[0] = {n}"),
    "scalar tensor": Kind(make="torch.tensor(float({n}))", get="{s}", put="{s}.fill_({n})"),
    "whole tensor": Kind(make="torch.tensor([7, int({n})])", get="{s}[1]", put="{s}[1] = {n}"),
    "bfloat16": Kind(make="torch.tensor([{n}, 7], dtype=torch.bfloat16)", get="{s}[0]", put="{s}[0] = {n}"),
    "tensor with a gradient": Kind(
        make="torch.tensor([float({n}), 7], requires_grad=True)", get="{s}[0]", put="{s}.data[0] = {n}"
    ),
    "transposed": Kind(make="torch.tensor([[float({n}), 1], [2, 3]]).t()", get="{s}[0, 0]", put="{s}[0, 0] = {n}"),
    "tensor in a list": Kind(make="[torch.tensor([float({n})])]", get="{s}[0][0]", put="{s}[0][0] = {n}"),
    "tensor in a dict": Kind(make='{{"w": torch.tensor([float({n})])}}', get='{s}["w"][0]', put='{s}["w"][0] = {n}'),
    "buffer": Kind(
        anew="{o}.register_buffer({name!r}, torch.tensor([float({n})]))",
        get="{s}[0]",
        put="{s}[0] = {n}",
        whens=NOT_LOADED,
    ),
    "view of a buffer": Kind(
        anew='{o}.register_buffer("base", torch.tensor([7, float({n})])); {s} = {o}.base[1:]',
        get="{s}[0]",
        put="{o}.base[1] = {n}",
        whens=NOT_LOADED,
    ),
}
_STREAMS = {
    "torch.Generator": stream(
        "torch.Generator().manual_seed(seed_of({n}))",
        "int(torch.randint(5, (), generator={s}))",
        "{s}.manual_seed(seed_of({n}))",
        seeded="torch.Generator().manual_seed(k)",
    ),
    "numpy Generator": stream(
        "np.random.default_rng(seed_of({n}))", "int({s}.integers(5))", seeded="np.random.default_rng(k)"
    ),
    "RandomState": stream(
        "np.random.RandomState(seed_of({n}))",
        "int({s}.randint(5))",
        "{s}.seed(seed_of({n}))",
        seeded="np.random.RandomState(k)",
    ),
    "random.Random": stream(
        "random.Random(seed_of({n}))", "{s}.randrange(5)", "{s}.seed(seed_of({n}))", seeded="random.Random(k)"
    ),
    "torch.Generator in a list": stream(
        "[torch.Generator().manual_seed(seed_of({n}))]",
        "int(torch.randint(5, (), generator={s}[0]))",
        "{s}[0].manual_seed(seed_of({n}))",
        seeded="[torch.Generator().manual_seed(k)]",
    ),
    "itertools.count": stream("itertools.count(-({n}))", "next({s})", written=False),
    "iterator": stream("iter([1] * ({n}) + [0] + [1] * 20)", "next({s})", written=False),
    "generator": stream(
        "countdown({n})",
        "next({s})",
        top="def countdown(n):\n    while True:\n        yield n\n        n -= 1",
        written=False,
    ),
    "open file": stream('io.StringIO("1" * ({n}) + "0" + "1" * 20)', "int({s}.read(1))", written=False),
}
_CODE = {
    "lambda": Kind(make="lambda level={n}: level", get="{s}()", written=False),
    "closure": Kind(
        make="closure({n})",
        get="{s}()",
        top="def closure(level):\n    def read():\n        return level\n    return read",
        written=False,
    ),
    "bound method": Kind(
        make="Reader({n}).get",
        get="{s}()",
        put="{s}.__self__.level = {n}",
        top="class Reader:\n    def __init__(self, level):\n        self.level = level\n\n"
        "    def get(self):\n        return self.level",
        written=False,
    ),
    "lock": Kind(
        make="locked({n})",
        get="float(not {s}.locked())",
        top="def locked(level):\n    lock = threading.Lock()\n    level or lock.acquire()\n    return lock",
        written=False,
        comparable=False,
        most=1,
    ),
    "forward hook": Kind(
        anew="{s} = nn.Identity(); {s}.register_forward_hook(lambda m, i, o, level={n}: level * o)",
        get="{s}(torch.ones(()))",
        written=False,
    ),
    "patched method": Kind(anew="{o}.get_level = lambda level={n}: level", get="{o}.get_level()", written=False),
    "weak reference": Kind(
        anew="level = {n}; {o}.boxes = [Box(0), Box(1)]; {s} = weakref.ref({o}.boxes[level])",
        get="{s}().level",
        top=_BOX,
        written=False,
        most=1,
    ),
}
_GATE = (
    "class Gate(nn.Module):\n    def __init__(self, level):\n        super().__init__()\n        self.level = level\n\n"
    "    def forward(self, x):\n        return x * self.level"
)
_LINEAR = (
    "def linear(level):\n    made = nn.Linear(1, 1)\n    made.weight.data.fill_(level)\n    made.bias.data.fill_(0)\n"
    "    return made"
)
_MODULES = {
    "attribute of a parameter": Kind(
        anew='{o}.weight = getattr({o}, "weight", nn.Parameter(torch.ones(1))); {o}.weight.level = {n}',
        get="{o}.weight.level",
        put="{o}.weight.level = {n}",
    ),
    "whether a parameter is frozen": Kind(
        anew="{o}.weight = nn.Parameter(torch.ones(1), requires_grad=bool({n}))",
        get="float({o}.weight.requires_grad)",
        put="{o}.weight.requires_grad_(bool({n}))",
        most=1,
    ),
    "torch's child of another class": Kind(
        make="(nn.Softplus() if {n} else nn.ReLU())", get="{s}(-torch.ones(())).ceil()", written=False, most=1
    ),
    "new child": Kind(
        get='{o}.gate(torch.ones(())) if hasattr({o}, "gate") else 1',
        put="{o}.gate = Gate({n})",
        top=_GATE,
        written=False,
        whens=LATE - {RESUMED},
    ),
    "no child any more": Kind(
        make="(nn.Identity() if {n} else None)", get="float({s} is not None)", written=False, most=1
    ),
    "attribute of a child": Kind(make="Gate({n})", get="{s}.level", put="{s}.level = {n}", top=_GATE),
    "attribute of torch's own": Kind(
        make="nn.LeakyReLU({n})", get="-{s}(-torch.ones(()))", put="{s}.negative_slope = {n}"
    ),
    "child of another class": Kind(
        make="(Zero, One)[{n}]()",
        get="{s}(torch.ones(()))",
        top=f"{_GATE}\n\n\nclass Zero(Gate):\n    def __init__(self):\n        super().__init__(0)\n\n\n"
        "class One(Gate):\n    def __init__(self):\n        super().__init__(1)\n\n"
        "    def forward(self, x):\n        return x",
        written=False,
        most=1,
    ),
    "list of children": Kind(
        make="nn.ModuleList([Gate(7), Gate({n})])", get="{s}[1].level", put="{s}[1].level = {n}", top=_GATE
    ),
    "module in a list": Kind(
        make="[linear({n})]",
        get="{s}[0](torch.ones(1)).detach()[0]",
        put="{s}[0].weight.data.fill_({n})",
        top=_LINEAR,
    ),
    "module in a dict": Kind(make='{{"g": Gate({n})}}', get='{s}["g"].level', put='{s}["g"].level = {n}', top=_GATE),
    "order of children in a list": Kind(
        anew="{o}.zero, {o}.one = Gate(0), Gate(1); {s} = [{o}.one, {o}.zero] if {n} else [{o}.zero, {o}.one]",
        get="{s}[0].level",
        put="{s}.reverse()",
        top=_GATE,
        written=False,
        most=1,
    ),
    "which child": Kind(
        anew="{o}.zero, {o}.one = Gate(0), Gate(1); {s} = {o}.one if {n} else {o}.zero",
        get="{s}.level",
        put="{s} = {o}.one if {n} else {o}.zero",
        top=_GATE,
        written=False,
        most=1,
    ),
    "parameter in a list": Kind(
        anew="{o}.level = nn.Parameter(torch.tensor(float({n})), requires_grad=False); {s} = [{o}.level]",
        get="{s}[0]",
        put="{s}[0].data.fill_({n})",
        whens=NOT_LOADED,
    ),
    "mode": Kind(make="nn.Dropout().train(bool({n}))", get="float({s}.training)", put="{s}.train(bool({n}))", most=1),
    "metric": Kind(
        make="summed({n})",
        get="{s}.compute()",
        put="level = {n}; {s}.reset(); {s}.update(float(level))",
        top="def summed(level):\n    made = torchmetrics.SumMetric()\n    made.update(float(level))\n    return made",
    ),
    "metric with a list": Kind(
        make="gathered({n})",
        get="{s}.compute()",
        put="level = {n}; {s}.reset(); {s}.update(float(level))",
        top="def gathered(level):\n    made = torchmetrics.CatMetric()\n    made.update(float(level))\n    return made",
    ),
}
_ELSEWHERE = {
    "hparams": Kind(anew='{o}.hparams["level"] = {n}', get='{o}.hparams["level"]', root=True),
    "hparams of hparams": Kind(
        anew='{o}.hparams["cfg"] = {{"level": {n}}}',
        get='{o}.hparams["cfg"]["level"]',
        put='{o}.hparams["cfg"]["level"] = {n}',
        root=True,
    ),
    "rate": Kind(
        get='{o}.trainer.optimizers[0].param_groups[0]["lr"]',
        put='{o}.trainer.optimizers[0].param_groups[0]["lr"] = float({n})',
        written=False,
        root=True,
        whens=WITH_TRAINER | {"on_train_start"},
    ),
    "attribute of the trainer": Kind(
        get='getattr({o}.trainer, "level", 1)',
        put="{o}.trainer.level = {n}",
        written=False,
        root=True,
        whens=WITH_TRAINER | {"on_train_start"},
    ),
    "attribute of the class": Kind(
        get='getattr({o}, "level", 1)', put="type({o}).level = {n}", written=False, outside=True, whens=LATE
    ),
    "global": Kind(
        get="LEVEL", put='globals()["LEVEL"] = {n}', top="LEVEL = 1", written=False, outside=True, whens=LATE
    ),
    "environment": Kind(
        get='int(os.environ.get("LEVEL_" + __name__, "1"))',
        put='os.environ["LEVEL_" + __name__] = str({n})',
        written=False,
        outside=True,
        whens=LATE,
    ),
    "file": Kind(
        get="int(FILE.read_text()) if FILE.exists() else 1",
        put="FILE.write_text(str({n}))",
        top='FILE = pathlib.Path(__file__).with_suffix(".txt")',
        written=False,
        outside=True,
        whens=LATE,
    ),
    "cache of a function": Kind(
        get="cached()",
        put="SOURCE.level = {n}; cached.cache_clear(); cached(); SOURCE.level = 1",
        top="SOURCE = types.SimpleNamespace(level=1)\n\n\n@functools.lru_cache\ndef cached():\n    return SOURCE.level",
        written=False,
        outside=True,
        whens=LATE,
    ),
}
INSIDE = {
    **_PLAIN,
    **_CONTAINERS,
    **_OBJECTS,
    **_ARRAYS,
    **_STREAMS,
    **_CODE,
    **_MODULES,
    **_ALMOST_EQUAL,
    **_LARGE,
    **_OF_LIBRARIES,
}
"""Attributes of a module."""
KINDS = {**INSIDE, **_ELSEWHERE}
