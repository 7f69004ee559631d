"""Data that others have written: nothing of it is unpickled or executed, and no model brings code of its own."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jinja2
import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast

from rollmesh.generators.engines.checkpoint_names import CheckpointLayout
from rollmesh.generators.engines.external.model_info import read_folder
from rollmesh.generators.engines.hf.model.loading import load_model as load_model_of_generator
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.learner.engines.fsdp2.packing_choice import describe_packing
from rollmesh.learner.model_files import location
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.config import yaml_text
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.tokenizer_files import load_optional_tokenizer, load_tokenizer
from rollmesh.mesh.trajectory.images import ImageProcessor
from tests.generators.engines import tiny
from tests.repository import REPOSITORY
from tests.test_layers import FILES, source

# Functions that read objects, or run text, wherever it comes from.
MODULES = {
    *("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"),
    *("torch.multiprocessing", "torch.distributed.checkpoint", "torch.distributed.rpc"),
}
CALLS = {"eval", "exec", "compile", "torch.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load", "numpy.load"}
KEYWORDS = {"allow_pickle", "allow_all_kernels", "use_kernels", "shell"}
# Collectives of Python objects: each rank unpickles what the others send.
OBJECTS = ("_object", "_object_list")
# Functions of transformers.
LOADS = {"from_pretrained", "from_config"}
# Where it stands all the same, and why that is safe.
REASONS = {
    ("generators/engines/sglang/transfers/sharing.py", "pickle"): "writes handles of memory, and reads nothing",
    ("generators/engines/sglang/transfers/sharing.py", "torch.multiprocessing"): "names what SGLang lets in a pickle",
    ("generators/engines/vllm/fork_server.py", "multiprocessing"): "says how vLLM starts its own processes",
    ("generators/engines/vllm/launcher.py", "multiprocessing"): "asks for the children of this process",
    ("generators/engines/vllm/process_tree.py", "multiprocessing"): "ends children of this process",
    ("generators/engines/sglang/cpu/shims/forking_server.py", "multiprocessing"): "says how the server starts its own",
    ("learner/checkpoint/adapter_weights.py", "torch.distributed.checkpoint"): "reads the index of an own run's folder",
    ("learner/trainers/objectives/reference_file.py", "numpy.load"): "numbers alone",
    ("learner/trainers/objectives/reference_file.py", "allow_pickle"): "false",
    ("rollmesh/testing/contract_adapters.py", "torch.distributed.checkpoint"): "the index of a test's own folder",
    ("learner/engines/tensors/box_state.py", "torch.distributed.checkpoint"): "plans what is read from the same folder",
    ("learner/engines/tensors/checkpoint_tensors.py", "torch.distributed.checkpoint"): "the same folder, for an export",
    (
        "learner/engines/tensors/state.py",
        "torch.distributed.checkpoint",
    ): "an own run's folder; see docs/security.md",
    (
        "reward_service/sandbox/keeper.py",
        "marshal",
    ): "a job for the process that runs it, in a file that only it writes",
    ("reward_service/sandbox/program.py", "marshal"): "the same, read before the program runs",
    ("reward_service/sandbox/python_program.py", "compile"): "a model's program, in a process that the kernel confines",
    ("reward_service/sandbox/python_program.py", "exec"): "the same",
    ("reward_service/code/workplace.py", "compile"): "files of this package, for the sandbox",
    ("reward_service/code/workplace.py", "marshal"): "the same, written and never read here",
    ("reward_service/code/inside/batch.py", "compile"): "a model's program, in the sandbox",
    ("reward_service/code/inside/batch.py", "exec"): "the same",
    ("reward_service/code/inside/loading.py", "compile"): "the same",
    ("reward_service/code/inside/loading.py", "exec"): "the same",
    ("reward_service/code/inside/runner.py", "compile"): "a row's tests, in the sandbox",
    ("reward_service/code/inside/runner.py", "exec"): "the same",
    ("rollmesh/testing/worlds.py", "multiprocessing"): "a test and the processes that it has forked",
    ("rollmesh/testing/worlds.py", "pickle"): "the same: between a test and its own children",
    ("mesh/config/yaml_text.py", "yaml.load"): "with safe loaders, which a test below looks at",
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression of that form; empty of others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def unsafe(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Functions that may run code of others, by full name, among the imports and calls of a module."""
    names: dict[str, str] = {}
    calls: list[ast.Call] = []
    for node in nodes:
        imported: dict[str, str] = {}
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, ast.Import):
            imported = {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imported = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        names |= {name: full for name, full in imported.items() if "." not in name}
        for full in imported.values():
            yield from (module for module in MODULES if f"{full}.".startswith(f"{module}."))
    for call in calls:
        head, _, rest = dotted(call.func).partition(".")
        called = ".".join(filter(None, (names.get(head, head), rest)))
        yield from unsafe_call(called, {word.arg: word.value for word in call.keywords})


def unsafe_call(called: str, given: Mapping[str | None, ast.expr]) -> Iterator[str]:
    """The same of a call, by its full name and the keywords that it has."""
    if called in CALLS or called.endswith(OBJECTS):
        yield called
    yield from (word for word in KEYWORDS if word in given)
    last = called.rpartition(".")[2]
    if last in LOADS and "GenerationConfig" not in called:
        trust = given.get("trust_remote_code")
        if not isinstance(trust, ast.Constant) or trust.value is not False:
            # Left out, transformers asks at the terminal whether it shall run the model's code.
            yield f"{last} without trust_remote_code=False"
    elif "trust_remote_code" in given:
        yield "trust_remote_code"


def test_nothing_is_unpickled_evaluated_or_executed() -> None:
    found = {(str(path.relative_to(REPOSITORY)), what) for path in FILES for what in unsafe(source(path).nodes)}
    assert found == set(REASONS)


def test_a_configuration_makes_no_objects() -> None:
    text = "!!python/object/apply:os.getcwd []"
    for filling in ("", "\n#" + "-" * yaml_text._QUICK):
        with pytest.raises(yaml.constructor.ConstructorError):
            yaml_text.parse(text + filling)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "import torch as t\nt.load('x')",
        "from torch import load\nload('x')",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])", "eval('1')", "exec('1')",
        "from torch.distributed import all_gather_object\nall_gather_object([], 1)", "import yaml as y\ny.load('')",
        "import numpy as np\nnp.load('x')", "f(trust_remote_code=x)", "A.from_pretrained('x')",
        "import torch.distributed.checkpoint as dcp", "import multiprocessing.connection",
    ],
)  # fmt: skip
def test_what_would_run_is_seen(text: str) -> None:
    assert list(unsafe(ast.walk(ast.parse(text))))


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose code would leave a file, at a terminal at which all is answered with yes."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    autos = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoProcessor")
    told: dict[str, object] = dict.fromkeys(autos, "own.Own") | {"AutoTokenizer": ["own.Own", "own.Own"]}
    for name in ("config.json", "tokenizer_config.json", "processor_config.json"):
        described = {"model_type": "own", "tokenizer_class": "Own", "processor_class": "Own", "auto_map": told}
        (tmp_path / name).write_text(json.dumps(described))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        read_config,
        lambda folder: read_folder(folder, None),
        load_optional_tokenizer,
        TokenizerCodec,
        ImageProcessor.load,
        load_tokenizer,
        location.context_length,
        lambda folder: describe_packing(ModelSection(path=str(folder))),
        StoredModel,
    ],
)
def test_code_of_a_model_is_not_run_whatever_is_answered(read: Callable[[Path], object], with_code: Path) -> None:
    try:
        read(with_code)
    except (DataError, ValueError) as error:
        assert "custom code" in str(error)
    assert not (with_code / "ran").exists()


def test_kernels_that_a_configuration_names_are_not_fetched(tmp_path: Path) -> None:
    """transformers would load them at the first model that it builds, for its shapes alone too."""
    model = tiny.build_model(tiny.configs()["qwen3"])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_implementation": "kernels-community/any"}))
    CheckpointLayout(read_config(tmp_path), torch.float32)
    assert describe_packing(ModelSection(path=str(tmp_path))).startswith("qwen3: sequences side by side")
    with StoredModel(tmp_path) as stored:
        assert stored.model.config._attn_implementation == "sdpa"
    assert load_model_of_generator(tmp_path, dtype="float32", device="cpu").model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.train_tokenizer()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_sees_nothing_but_its_messages(template: str, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = template
    with pytest.raises((jinja2.TemplateError, OverflowError, AttributeError, TypeError)):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
