"""Every mistake of a user's has a message with its line, advice, and exit code 1."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import (
    MODEL,
    Gemsc,
    Outcome,
    files,
    gemsc_here,
    start,
)

# what a case changes is at the end of the file: the last definition of a name counts
HERE = "  # <-- here"


def with_forward(body: str) -> str:
    """Return the file with another forward; `HERE` marks the line that is wrong."""
    lines = [f"        {line}\n" for line in body.split("\n")]
    return re.sub(
        r"(def forward\(self, x\):\n)(.*?\n)\n", rf"\1{''.join(lines)}\n", MODEL,
        count=1, flags=re.DOTALL,
    )  # fmt: skip


def without(name: str) -> str:
    """Return the file without one of its functions."""
    return re.sub(rf"def {name}\(.*?\n(?=\n\n|\Z)", "", MODEL, flags=re.DOTALL)


MARKED = "net = Net()\n    net.second.bias.no_decay = 3\n    return net"


def with_attributes(test: str, top: str = "") -> str:
    """Return the file with weights that have no decay where a test of them says so."""
    return without("optimizer").replace("return Net()", MARKED) + (
        f"{top}\ndef optimizer(ps):{HERE}\n    groups = [[], []]\n"
        "    for name, p in ps:\n"
        f"        groups[{test}].append(p)\n"
        "    groups = [dict(params=g, weight_decay=i) for i, g in enumerate(groups)]\n"
        "    return torch.optim.AdamW(groups)\n"
    )


@dataclass(frozen=True)
class Mistake:
    """A file, a command line, and what the message must say."""

    says: tuple[str, ...]
    text: str = MODEL
    words: str = "compile model.py"
    advises: str = ""
    code: int = 1


FILES = {
    "syntax error": Mistake(
        ("syntax error",), MODEL + f"def f(:{HERE}\n", advises="python model.py"
    ),
    "import of what is not there": Mistake(
        ("importing model.py fails", "ModuleNotFoundError"),
        MODEL + f"import not_there_at_all{HERE}\n",
        advises="install not_there_at_all",
    ),
    "an import error that names nothing": Mistake(
        ("importing model.py fails: ModuleNotFoundError: no luck",),
        f"raise ModuleNotFoundError('no luck'){HERE}\n" + MODEL,
    ),
    "error at import": Mistake(
        ("importing model.py fails", "ZeroDivisionError"), MODEL + f"1 / 0{HERE}\n"
    ),
    "sys.exit at import": Mistake(
        ("importing model.py fails", "SystemExit: 3"),
        MODEL + f"import sys\nsys.exit(3){HERE}\n",
    ),
    "no model": Mistake(
        ("no model in model.py", "Net"),
        without("model"),
        advises="compile model.py:Net",
    ),
    "no Module": Mistake(
        ("model returns an object of type int",),
        MODEL + f"def model():{HERE}\n    return 3\n",
        advises="return a torch.nn.Module",
    ),
    "optimizer with a closure": Mistake(
        ("LBFGS computes the loss several times per step",),
        without("optimizer")
        + f"def optimizer(ps):{HERE}\n"
        + "    return torch.optim.LBFGS([p for _, p in ps])\n",
    ),
    "optimizer that asserts that there is a closure": Mistake(
        ("Sharp computes the loss several times per step",),
        without("optimizer") + "class Sharp(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n        assert closure is not None\n"
        "        return super().step(closure)\n\n"
        f"def optimizer(pairs):{HERE}\n    return Sharp(pairs, lr=0.1)\n",
    ),
    "optimizer that has been made": Mistake(
        ("optimizer is an object of type Adam",),
        without("optimizer")
        + f"optimizer = torch.optim.Adam(model().parameters()){HERE}\n",
        advises="def optimizer(parameters): return Adam(parameters, ...)",
    ),
    "scheduler that has been made": Mistake(
        ("scheduler is an object of type StepLR",),
        MODEL
        + f"scheduler = torch.optim.lr_scheduler.StepLR({HERE}\n"
        + "    torch.optim.SGD(model().parameters(), 0.1), 3\n)\n",
        advises="def scheduler(optimizer): return StepLR(optimizer, ...)",
    ),
    "optimizer without a schedule": Mistake(
        ("Free has different weights in training and in",),
        without("optimizer")
        + "class Free(torch.optim.SGD):\n    def train(self):\n        pass\n\n"
        + "    def eval(self):\n        pass\n\n"
        + f"def optimizer(ps):{HERE}\n    return Free(ps, lr=0.1)\n",
        advises="AdamW with a schedule",
    ),
    "optimizer of another model": Mistake(
        ("optimizer() takes other parameters than it gets",),
        without("optimizer")
        + f"other = Net()\ndef optimizer(ps):{HERE}\n"
        + "    return torch.optim.SGD(other.parameters(), 0.1)\n",
        advises="(name, parameter) pairs that it gets",
    ),
    "optimizer of the model at the top of the file": Mistake(
        ("optimizer() takes other parameters than it gets",),
        without("optimizer").replace("def model():\n    return Net()", "model = Net()")
        + f"def optimizer(ps):{HERE}\n"
        + "    return torch.optim.SGD(model.parameters(), 0.1)\n",
    ),
    "optimizer that asks for attributes": Mistake(
        ("optimizer() goes by the model's own parameters, or by their attributes",),
        with_attributes('hasattr(p, "no_decay")'),
        advises="NO_DECAY = {name for name, p in Net().named_parameters()",
    ),
    "optimizer that knows parameters of the model": Mistake(
        ("optimizer() goes by the model's own parameters, or by their attributes",),
        with_attributes("p in NORMS", "NORMS = {*net.second.parameters()}").replace(
            "def model():\n    net = Net()\n", "net = Net()\ndef model():\n"
        ),
    ),
    "optimizer with a rate in an attribute": Mistake(
        ("optimizer() goes by the model's own parameters, or by their attributes",),
        without("optimizer").replace("return Net()", MARKED)
        + f"def optimizer(ps):{HERE}\n"
        + "    rate = lambda p: getattr(p, 'no_decay', 0.1)\n"
        + "    groups = [dict(params=[p], lr=rate(p)) for _, p in ps]\n"
        + "    return torch.optim.SGD(groups)\n",
    ),
    "several optimizers": Mistake(
        ("optimizer() returns list, which cannot step",),
        without("optimizer")
        + f"def optimizer(ps):{HERE}\n    return [torch.optim.SGD(ps, lr=0.1)]\n",
    ),
    "optimizer by hand": Mistake(
        ("optimizer() returns ByHand, which has no param_groups",),
        without("optimizer")
        + "class ByHand:\n    def step(self):\n        pass\n"
        + f"def optimizer(ps):{HERE}\n    return ByHand()\n",
        advises="derive a class of your own from it",
    ),
    "optimizer of tensors": Mistake(
        ("optimizer() fails: AttributeError: 'tuple' object has no attribute 'ndim'",),
        without("optimizer")
        + f"def optimizer(ps):\n    return [p for p in ps if p.ndim > 1]{HERE}\n",
        advises="(name, parameter) pairs",
    ),
    "optimizer of trained parameters alone": Mistake(
        ("optimizer() fails for those parameters that one rank has (first.weight, ",),
        without("optimizer").replace(
            "return Net()",
            "net = Net()\n    net.first.requires_grad_(False)\n    return net",
        )
        + "def optimizer(ps):\n    ps = list(ps)\n"
        + f"    assert all(p.requires_grad for _, p in ps){HERE}\n"
        + "    return torch.optim.SGD(ps, 0.1)\n",
        advises="also of frozen parameters",
    ),
    "optimizer that wants another rank's": Mistake(
        ("parameters that one rank has (first.weight, ...): KeyError: 'third.bias'",),
        without("optimizer")
        + f"def optimizer(ps):\n    chosen = dict(ps)['third.bias']{HERE}\n"
        + "    return torch.optim.SGD([chosen], 0.1)\n",
        words="compile model.py --ranks 2",
        advises="pick out those that are there",
    ),
    "model() raises": Mistake(
        ("model() fails: ValueError: no width",),
        MODEL + f"def model():\n    raise ValueError('no width'){HERE}\n",
        advises="when it is called alone",
    ),
    "model() loads what is not there": Mistake(
        ("model() fails: there is no file or folder nothing.safetensors",),
        MODEL
        + "import gemsc\ndef model():\n"
        + f"    return gemsc.load_weights(Net(), 'nothing.safetensors'){HERE}\n",
        advises="give a .safetensors file",
    ),
    "model() exits": Mistake(
        ("model() fails: SystemExit",),
        MODEL + f"import sys\ndef model():\n    sys.exit(){HERE}\n",
    ),
    "model(width)": Mistake(
        ("model() fails: TypeError", "width"),
        MODEL + f"def model(width):{HERE}\n    return Net()\n",
        advises="without arguments",
    ),
    "no example_inputs": Mistake(
        ("no example_inputs in model.py",),
        without("example_inputs").replace("def model():", f"def model():{HERE}"),
        advises="add example_inputs()",
    ),
    "empty example_inputs": Mistake(
        ("example_inputs holds no tensor",),
        MODEL + f"def example_inputs():{HERE}\n    return ()\n",
    ),
    "example_inputs of a wrong type": Mistake(
        ("example_inputs is of type int",),
        MODEL + f"def example_inputs():{HERE}\n    return 3\n",
    ),
    "loss without target": Mistake(
        ("nothing provides a target for it",),
        without("dataset").replace(
            "def loss(output, target):", f"def loss(output, target):{HERE}"
        ),
        advises="add dataset()",
    ),
    "loss is no function": Mistake(
        ("loss is of type int",), MODEL + f"loss = 3{HERE}\n", advises="loss(output"
    ),
    "loss is no scalar": Mistake(
        ("the loss has shape [2, 4]",),
        MODEL + f"def loss(output, target):{HERE}\n    return output\n",
        advises="take the mean",
    ),
    "loss does not learn": Mistake(
        ("no parameter gets a gradient",),
        MODEL + f"def loss(output, target):{HERE}\n    return output.detach().sum()\n",
        advises="detach",
    ),
    "dataset of no pairs": Mistake(
        ("does not return (input, target) pairs",),
        MODEL + f"def dataset():{HERE}\n    return [torch.zeros(8)] * 9\n",
        advises="return a pair",
    ),
    "dataset of batches": Mistake(
        ("has input[0] of shape [2, 8], example_inputs() of [8]",),
        MODEL
        + f"def dataset():{HERE}\n"
        + "    return [(torch.zeros(2, 8), torch.arange(2))] * 9\n",
        advises="without its first dimension",
    ),
    "example inputs with the target": Mistake(
        ("a sample of the dataset has no input[1], but input[0]",),
        MODEL.replace("def dataset():", f"def dataset():{HERE}")
        + "def example_inputs():\n    return torch.randn(2, 8), torch.arange(2)\n",
        advises="the target is none of them",
    ),
    "dataset without an input": Mistake(
        ("a sample of the dataset has no input[0], but input['x']",),
        MODEL + f"def dataset():{HERE}\n    return [(dict(x=torch.zeros(8)), 0)] * 9\n",
        advises="the structure and the shapes of example_inputs()",
    ),
    "dataset of more inputs": Mistake(
        ("a sample of the dataset has input[1], which example_inputs() does not have",),
        MODEL + f"def dataset():{HERE}\n"
        "    return [((torch.zeros(8), torch.ones(8)), 0)] * 9\n",
        advises="leave it out of the samples",
    ),
    "numbers that are fixed": Mistake(
        ("a sample of the dataset has input[1], which is 2 in example_inputs()",),
        with_forward("return self.third(self.second(self.first(x)))").replace(
            "(torch.randn(2, 8),)", "(torch.randn(2, 8), 2)"
        )
        + f"def dataset():{HERE}\n"
        "    return [((torch.zeros(8), i), 0) for i in range(9)]\n",
        advises="return a tensor there, too",
    ),
    "dataset of dictionaries": Mistake(
        ("(input, target) pairs: a sample is of type dict, with the keys 'x', 'y'",),
        MODEL + f"def dataset():{HERE}\n    return [dict(x=torch.zeros(8), y=0)] * 9\n",
        advises="({name of an argument of forward: tensor}, target)",
    ),
    "empty dataset": Mistake(
        ("the dataset is empty",), MODEL + f"def dataset():{HERE}\n    return []\n"
    ),
    "dataset without len": Mistake(
        ("the dataset, of type generator, does not say how many samples it has",),
        MODEL
        + f"def dataset():{HERE}\n    return ((x, 0) for x in torch.zeros(9, 8))\n",
        advises="in memory as list(stream)",
    ),
    "dataset without return": Mistake(
        ("the dataset is None",),
        MODEL + f"def dataset():{HERE}\n    Data(24)\n",
        advises="end its function with return dataset",
    ),
    "a loader in place of a dataset": Mistake(
        ("the dataset, of type DataLoader, does not return samples by index",),
        MODEL + "from torch.utils.data import DataLoader\n"
        f"def dataset():{HERE}\n    return DataLoader(Data(24))\n",
        advises="return a Dataset with __getitem__",
    ),
    "branch on data": Mistake(
        ("needs the value of a tensor",),
        with_forward(
            f"x = self.first(x)\nif x.sum() > 0:{HERE}\n    x = 2 * x\n"
            "return self.third(self.second(x))"
        ),
        advises="torch.where",
    ),
    "item() in forward": Mistake(
        ("needs the value of a tensor",),
        with_forward(
            f"x = self.first(x)\ns = x.sum().item(){HERE}\nreturn s * self.third(x)"
        ),
        advises="torch.where",
    ),
    "size that depends on data": Mistake(
        ("size of this tensor depends on the data",),
        with_forward(f"x = self.first(x)\nreturn x[x > 0]{HERE}"),
        advises="torch.where",
    ),
    "repeats that depend on data": Mistake(
        ("size of this tensor depends on the data",),
        with_forward(
            "x = self.first(x)\nn = torch.arange(len(x)).to(x.device)\n"
            f"return x.repeat_interleave(n, 0){HERE}"
        ),
        advises="output_size=",
    ),
    "unique values": Mistake(
        ("size of this tensor depends on the data",),
        with_forward(f"x = self.first(x)\nreturn x * len(x.argmax(1).unique()){HERE}"),
        advises="F.one_hot(values, number).sum(0)",
    ),
    "random of Python": Mistake(
        ("forward is not deterministic",),
        "import random\n"
        + with_forward(
            f"x = self.first(x)\ns = random.random()\nreturn self.third(s * x){HERE}"
        ),
        advises="use torch's random functions",
    ),
}

# a line that fails needs no advice: it fails in PyTorch too
FAILING_LINES = {
    "shapes that do not fit": Mistake(
        ("the model fails on example_inputs", "[2, 32]"),
        with_forward(
            "x = self.first(x)\nx = torch.cat([x, x], 1)\n"
            f"return self.third(self.second(x)){HERE}"
        ),
    ),
    "loss that fails": Mistake(
        ("the loss fails", "TypeError"),
        MODEL + f"def loss(output, target):\n    return output + 'a'{HERE}\n",
    ),
    "loss of sizes that fit on fake tensors alone": Mistake(
        ("the loss fails on float32 [2, 4]", "size mismatch"),
        MODEL
        + "def loss(output, target):\n    wrong = torch.zeros(2, 3, 1).long()\n"
        + "    pixels = output[:, :, None, None].expand(-1, -1, 3, 3)\n"
        + f"    return nn.functional.cross_entropy(pixels, wrong){HERE}\n",
    ),
}

COMMANDS = {
    "no such file": Mistake(("there is no file other.py",), words="compile other.py"),
    "a folder": Mistake(("there is no file folder",), words="compile ./folder"),
    "no Python file": Mistake(("is not a Python file",), words="compile ./text.txt"),
    "no such module": Mistake(
        ("there is no module nowhere.at_all",), words="compile nowhere.at_all:model"
    ),
    "another name": Mistake(
        ("no Other in model.py", "Net"), words="compile model.py:Other"
    ),
    "too many ranks": Mistake(
        ("5 stages need at least 5 blocks", "first"),
        words="compile model.py --ranks 5",
        advises="use --ranks",
    ),
    "too many stages on each rank": Mistake(
        ("4 stages need at least 4 blocks",),
        words="compile model.py --ranks 2 --schedule interleaved",
        advises="--schedule 1f1b --placement linear",
    ),
    "too many ranks of each replica": Mistake(
        ("4 stages need at least 4 blocks",),
        words="simulate model.py --ranks 32 --data 8",
        advises="use --ranks 24 --data 8",
    ),
    "more ranks than there are": Mistake(
        ("--ranks is 1000000000",),
        words="compile model.py --ranks 1000000000",
        advises="from 1 to 1,000,000",
    ),
    "memory without a unit": Mistake(
        ("'16' has no unit",),
        words="compile model.py --device-memory 16",
        advises="16GiB",
        code=2,
    ),
    "a name that is not text": Mistake(
        (r"'mod\udcffel.py' is not UTF-8 text",), words="compile mod\udcffel.py"
    ),
    "no ranks": Mistake(("--ranks is 0",), words="compile model.py --ranks 0"),
    "no micro-batches": Mistake(
        ("--micro-batches is 0",), words="compile model.py --micro-batches 0", code=2
    ),
    "blocks that do not add up": Mistake(
        ("adds up to 9 blocks", "first"),
        words="compile model.py --blocks 4,5",
        advises="make the numbers add up",
    ),
    "blocks of too many stages": Mistake(
        ("--blocks 1,1,1", "3 stages"), words="compile model.py --blocks 1,1,1"
    ),
    "a stage without blocks": Mistake(
        ("has a stage without blocks",), words="compile model.py --blocks 3,0"
    ),
    "blocks that are no numbers": Mistake(
        ("is not a list of numbers",), words="compile model.py --blocks a,b", code=2
    ),
    "cut at an unknown module": Mistake(
        ("no block lies in a module 'secnd'",),
        words="compile model.py --cuts secnd",
        advises="second",
    ),
    "cuts out of order": Mistake(
        ("not in the order of the model",),
        words="compile model.py --ranks 3 --cuts third,second",
        advises="second, third",
    ),
    "too many cuts": Mistake(
        ("makes 3 stages, but 2 are needed",),
        words="compile model.py --cuts second,third",
    ),
    "two splits": Mistake(
        ("both --blocks and --cuts",),
        words="compile model.py --blocks 1,2 --cuts second",
    ),
    "explicit without split": Mistake(
        ("--balance explicit needs the split",),
        words="compile model.py --balance explicit",
        advises="--blocks 3,4,4,5",
    ),
    "a split beside --balance memory": Mistake(
        ("--balance memory chooses the split", "--blocks"),
        words="compile model.py --balance memory --blocks 1,2",
    ),
    "unknown balance": Mistake(
        ("--balance does not take 'best'",),
        words="compile model.py --balance best",
        advises="compute, memory",
        code=2,
    ),
    "unknown schedule": Mistake(
        ("--schedule does not take '1f2b'",),
        words="compile model.py --schedule 1f2b",
        advises="1f1b",
        code=2,
    ),
    "unknown placement": Mistake(
        ("unknown placement 'round'",),
        words="compile model.py --placement round",
        advises="linear",
    ),
    "unknown frontend": Mistake(
        ("--frontend does not take 'onyx'",),
        words="compile model.py --frontend onyx",
        advises="record",
        code=2,
    ),
    "memory that is no size": Mistake(
        ("'lots' is not a size",),
        words="compile model.py --device-memory lots",
        advises="16GiB",
        code=2,
    ),
    "memory that nothing fits in": Mistake(
        ("rank 0 needs", "1,024 bytes"),
        words="compile model.py --device-memory 1KiB",
        advises="--balance memory",
    ),
    "output onto a file": Mistake(
        ("text.txt is a file",), words="compile model.py -o text.txt", advises="-o"
    ),
    "output below a file": Mistake(
        ("text.txt/program: not a directory",),
        words="compile model.py -o text.txt/program",
    ),
    "output where nobody may write": Mistake(
        ("/proc/program",), words="compile model.py -o /proc/program"
    ),
    "output onto a folder with other things": Mistake(
        ("folder contains other files (__main__.py, notes)",),
        words="compile model.py -o folder",
        advises="-o",
    ),
    "unknown pass": Mistake(
        ("--print-after split: there is no such pass",),
        words="compile model.py --print-after split",
        advises="balance-stages",
    ),
    "graph of a wrong kind": Mistake(
        ("cannot draw graph.txt",), words="graph model.py -o graph.txt", advises=".svg"
    ),
    "graph below a file": Mistake(
        ("text.txt: file exists",), words="graph model.py -o text.txt/graph.svg"
    ),
    "another name of a precision": Mistake(
        ("--precision does not take 'bf16'",),
        words="compile model.py --precision bf16",
        advises="did you mean bfloat16? choose one of float32, ",
        code=2,
    ),
    "no number, nor auto": Mistake(
        ("--data takes a whole number or auto, not 'all'",),
        words="compile model.py --data all",
        advises="--data 2",
        code=2,
    ),
    "unknown option": Mistake(
        ("no such option: --rank",), words="compile model.py --rank 2", code=2
    ),
    "an option in place of a value": Mistake(
        ("--offload has no value: --ranks is an option",),
        words="compile model.py --offload --ranks 2",
        advises="kept in host memory: off, auto or names",
        code=2,
    ),
    "no argument": Mistake(("missing argument 'model'",), words="compile", code=2),
    "no number": Mistake(
        ("--ranks takes a whole number, not 'two'",),
        words="compile model.py --ranks two",
        code=2,
    ),
    "unknown command": Mistake(
        ("no such command 'comple'",), words="comple model.py", code=2
    ),
    "run of no program": Mistake(
        ("folder is not a program directory",), words="run folder", advises="compile -o"
    ),
    "run of nothing": Mistake(
        ("nothing is not a program directory",), words="run nothing"
    ),
    "show of a file": Mistake(
        ("text.txt is not a program directory",), words="show text.txt"
    ),
    "verify of nothing": Mistake(
        ("nothing is not a program directory",), words="verify nothing"
    ),
    "verify in an unknown dtype": Mistake(
        ("unknown dtype 'half'",), words="verify nothing --dtype half"
    ),
}


@pytest.fixture
def gemsc(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Gemsc:
    monkeypatch.chdir(tmp_path)
    return gemsc_here(monkeypatch, capfd)


def prepare(folder: Path, text: str = MODEL) -> None:
    (folder / "model.py").write_text(text)
    (folder / "text.txt").write_text("precious")
    (folder / "folder").mkdir()
    (folder / "folder" / "notes").write_text("precious")
    (folder / "folder" / "__main__.py").write_text("precious")


def refused(outcome: Outcome, mistake: Mistake) -> None:
    """Check the message: the place, what is wrong, what to do, and nothing else."""
    assert outcome.code == mistake.code, outcome
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    first, *following = outcome.err.splitlines()
    lines = mistake.text.splitlines()
    marked = [number for number, line in enumerate(lines, 1) if HERE in line]
    place = f"model.py:{marked[0]}: " if marked else ""
    assert first.startswith(f"{place}error: "), outcome.err
    if marked:
        assert following[0].strip() == lines[marked[0] - 1].strip()
    for part in mistake.says:
        assert part in first
    errors = [line for line in following if re.match(r"(\S+:\d+: )?error: ", line)]
    assert not errors


@pytest.mark.parametrize("name", [*FILES, *COMMANDS])
def test_a_mistake_has_a_message_with_advice_and_leaves_no_trace(
    name: str, gemsc: Gemsc, tmp_path: Path
) -> None:
    mistake = (FILES | COMMANDS)[name]
    prepare(tmp_path, mistake.text)
    before = files(tmp_path)
    outcome = gemsc(*mistake.words.split())
    refused(outcome, mistake)
    assert "\nhelp: " in outcome.err
    assert "install None" not in outcome.err
    assert mistake.advises in outcome.err.rpartition("\nhelp: ")[2]
    assert files(tmp_path) == before


@pytest.mark.parametrize("mistake", FAILING_LINES.values(), ids=FAILING_LINES.keys())
def test_a_line_that_fails_is_named(
    mistake: Mistake, gemsc: Gemsc, tmp_path: Path
) -> None:
    prepare(tmp_path, mistake.text)
    refused(gemsc("compile", "model.py"), mistake)
    assert not (tmp_path / "build").exists()


def test_a_command_line_without_words_shows_the_help(gemsc: Gemsc) -> None:
    outcome = gemsc()
    assert outcome.code == 0
    assert "compile" in outcome.out


@pytest.mark.slow
def test_mistakes_look_the_same_in_a_process_of_their_own(tmp_path: Path) -> None:
    mistake = FILES["branch on data"]
    prepare(tmp_path, mistake.text)
    outcome = start("compile", tmp_path / "model.py", "-o", tmp_path / "program")
    assert outcome.code == 1
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 3
    assert not (tmp_path / "program").exists()


def test_a_fault_of_ours_is_not_the_users(
    gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("ours")

    prepare(tmp_path)
    monkeypatch.setattr("gemsc.cli.compile.compile", fail)
    outcome = gemsc("compile", "model.py")
    assert outcome.code == 70
    assert "RuntimeError: ours" in outcome.err
    assert outcome.err.endswith("help: this is a bug in gemsc; please report it\n")


def test_a_full_disk_is_no_fault_of_ours(
    gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*arguments: object, **options: object) -> None:
        Path("/dev/full").write_text("all of it")  # its error names no file

    prepare(tmp_path)
    monkeypatch.setattr("gemsc.compiler.write_directory", fill)
    outcome = gemsc("compile", "model.py")
    assert outcome.code == 1
    assert outcome.err.endswith(
        "error: no space left on device\n"
        "help: free space there, or name another folder\n"
    )
    assert "Traceback" not in outcome.err


def test_an_interruption_says_nothing(
    gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, MODEL + "def model():\n    raise KeyboardInterrupt\n")
    outcome = gemsc("compile", "model.py")
    assert outcome == Outcome(130, "", "")


@pytest.mark.parametrize(
    "words",
    [
        "compile model.py --ranks 2 --schedule 1f1b --placement linear -o other",
        "simulate model.py --ranks 24 --data 8",
    ],
)
def test_what_the_advice_says_works(words: str, gemsc: Gemsc, tmp_path: Path) -> None:
    prepare(tmp_path)
    assert gemsc(*words.split()).code == 0


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "text",
    [
        with_attributes("p.ndim < 2 or p.shape[0] == 4"),
        with_attributes('name.endswith("bias")'),
        without("optimizer")
        + "def optimizer(ps):\n    return torch.optim.Adam([*{p for _, p in ps}])\n",
        with_attributes(
            "name in NO_DECAY",
            "NO_DECAY = {name for name, p in model().named_parameters() "
            'if hasattr(p, "no_decay")}',
        ),
    ],
    ids=["dimensions", "name", "any order", "names of those with an attribute"],
)
def test_parameters_may_have_attributes(
    text: str, gemsc: Gemsc, tmp_path: Path
) -> None:
    prepare(tmp_path, text)
    assert gemsc("compile", "model.py", "--no-check").code == 0


WITHOUT = MODEL.partition("def optimizer")[0] + "dataset = Data(24)\n\n\n"


@pytest.mark.slow(5)
@pytest.mark.parametrize(
    ("definition", "meant"),
    [
        ("def optimiser(p): ...", "optimizer"),
        ("def criterion(y, t): ...", ""),  # it has a loss
        ("def validation(): ...", "eval_dataset"),
        ("class Metric: ...", "metrics"),
        ("lr_scheduler = None", "scheduler"),
        ("def metric(): ...\nprint(metric)", ""),
        ("def helper(): ...", ""),
        ("scheduler = collate = None", ""),
        ("def predict_input(region): ...", ""),  # not predict_output
        ("from torch.optim import Optimizer", ""),
    ],
)
def test_what_is_spelled_otherwise_is_told(
    definition: str, meant: str, gemsc: Gemsc, tmp_path: Path
) -> None:
    prepare(tmp_path, f"{WITHOUT}{definition}\n")
    said = gemsc("compile", "model.py", "--no-check").err
    name = definition.replace("(", " ").replace(":", " ").split()
    told = f"warning: nothing uses {name['=' not in name]}\nhelp: if it is for gemsc, "
    line = f"model.py:{WITHOUT.count(chr(10)) + 1}: {told}call it {meant}\n"
    assert (line in said) == ("warning" in said) == bool(meant)
    note = "note: no optimizer() in model.py: it trains with SGD, learning rate 0.01\n"
    assert note in said


@pytest.mark.parametrize(
    ("more", "is_told"),
    [
        ("", True),
        ("eval_dataset = None", False),  # nothing calls them
        ("eval_windows = {}", False),  # whole cases
    ],
)
def test_metrics_that_would_end_an_evaluation_are_told(
    more: str, is_told: bool, gemsc: Gemsc, tmp_path: Path
) -> None:
    wrong = MODEL.replace("output.argmax(1)", "output.argmax(7)")
    prepare(tmp_path, f"{wrong}\n{more}\n")
    said = gemsc("compile", "model.py")
    line = wrong[: wrong.index("argmax(7)")].count("\n") + 1
    told = f"model.py:{line}: warning: tried on the examples, metrics() fails: IndexErr"
    assert (told in said.err) == ("warning" in said.err) == is_told
    assert said.code == 0


@pytest.mark.slow(1)
@pytest.mark.parametrize("more", ["", ", padding=-1"])
def test_a_collate_that_is_not_called_is_told(
    more: str, gemsc: Gemsc, tmp_path: Path
) -> None:
    prepare(tmp_path, f"{MODEL}\ndef collate(batch{more}): ...\n")
    line = MODEL.count("\n") + 2
    assert gemsc("compile", "model.py").err.startswith(
        f"model.py:{line}: warning: nothing uses collate, which takes no number of a "
        "shape\nhelp: "
    )
    text = f"{MODEL}\ndef collate(batch): ...\nmine = partial(print, collate)\n"
    (tmp_path / "model.py").write_text("from functools import partial\n" + text)
    assert gemsc("compile", "model.py").err == ""


def test_a_sampler_that_nothing_uses_is_told(gemsc: Gemsc, tmp_path: Path) -> None:
    prepare(tmp_path, f"{MODEL}\ndef sampler(): ...\n")
    told = (
        "warning: nothing uses sampler\nhelp: gemsc makes the batches; docs/models.md"
    )
    assert told in gemsc("compile", "model.py", "--no-check").err


def test_a_model_with_an_optimizer_trains_with_that(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    prepare(tmp_path)
    assert gemsc("compile", "model.py").err == ""
