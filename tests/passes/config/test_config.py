"""TOML files and flags as export options: layers, provenance, and what is refused."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.passes.config.read import load_config
from devplan.passes.config.rules import parse_bucket, parse_io, parse_skip
from devplan.passes.config.schema import config_schema
from devplan.passes.config.setting import SETTINGS, parse_size
from devplan.passes.options import BucketRule, ExportOptions, IoRule, PlacementRule
from devplan.passes.pipeline import pass_class, pass_names
from devplan.runtime.errors import UsageError

CONFIGS = Path(__file__).parents[3] / "configs"

EVERYTHING = """
pipeline = ["place-operators", "insert-copies", "group-regions"]

[export]
device = "cuda"
dtype = "float16"
quantize = "int4-weight-only"
arch = ["sm_90"]
weights = "reference"
weights-file = ["w.safetensors"]
allow-host-ops = true
allow_tf32 = true
library-calls = false
library-workspace = "1MiB"
tuning = "h200.json"
jobs = 2
check = true
output = "out.pte"
report = "out.html"

[plan]
device-planning = true
effort = "max"
reorder = false

[budget]
memory = "2GiB"
artifact-size = "50MB"
copies = 3

[io]
default = "host"
"prefill.tokens" = "device"
decode.cache = "device"
skip-h2d = ["prefill"]
skip-d2h = true

[buckets]
batch = [32, 1, 8]
"x:0" = 4
prefill.length = [128]

[[placement]]
device = "cpu"
module = "embed*"

[pass.insert-copies]
share-inputs = false
"""


@pytest.fixture
def write(tmp_path: Path):
    def writer(text: str) -> str:
        file = tmp_path / "mine.toml"
        file.write_text(text)
        return str(file)

    return writer


def test_no_file_and_no_flags_give_the_defaults_of_export_options() -> None:
    config = load_config()
    assert config.options == ExportOptions()
    assert set(config.origins.values()) == {"default"}


@pytest.mark.torch
def test_the_ready_default_file_says_what_the_code_says() -> None:
    config = load_config(str(CONFIGS / "default.toml"))
    options = config.options
    assert options == ExportOptions(io=options.io, pipeline=pass_names(), pass_options=options.pass_options)
    for name, table in options.pass_options.items():
        own = {
            f.name: f.default for f in fields(pass_class(name)) if isinstance(f.default, int | str | tuple)
        }
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        assert given == {key: own[key] for key in table}
    assert all(rule == IoRule("both", "host") for rule in config.options.io)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_every_ready_configuration_loads_by_its_name(file: Path) -> None:
    assert load_config(file.stem) == load_config(str(file))


def test_one_file_can_say_everything(write) -> None:
    config = load_config(write(EVERYTHING))
    assert config.options == ExportOptions(
        device="cuda",
        dtype="float16",
        quantize="int4-weight-only:128",
        architectures=("sm_90",),
        placement=(PlacementRule("cpu", module="embed*"),),
        io=(
            IoRule("both", "host"),
            IoRule("both", "device", "prefill", "tokens"),
            IoRule("both", "device", "decode", "cache"),
            IoRule("h2d", "device", "prefill"),
            IoRule("d2h", "device"),
        ),
        buckets=(
            BucketRule("batch", (1, 8, 32)),
            BucketRule("x:0", (4,)),
            BucketRule("prefill.length", (128,)),
        ),
        allow_host_ops=True,
        allow_tf32=True,
        library_calls=False,
        library_workspace=1 << 20,
        tuning=Path("h200.json"),
        planning_effort="max",
        reorder=False,
        memory_budget=2 << 30,
        weights="reference",
        weights_files=(Path("w.safetensors"),),
        pipeline=("place-operators", "insert-copies", "group-regions"),
        pass_options={"insert-copies": {"share_inputs": False}},
        jobs=2,
    )
    assert (config.max_artifact_size, config.max_copies, config.check) == (50_000_000, 3, True)
    assert config.weights_files == (Path("w.safetensors"),)
    assert (config.output, config.report) == (Path("out.pte"), Path("out.html"))


def test_every_setting_can_be_said_in_a_file() -> None:
    said = tomllib.loads(EVERYTHING)
    spelled = {f"{t}.{k.replace('_', '-')}" for t in ("export", "plan", "budget") for k in said[t]}
    assert {setting.name for setting in SETTINGS} - spelled == {"budget.fail-on-copy"}


def test_flags_win_over_the_file_and_each_value_knows_its_origin(write) -> None:
    file = write(EVERYTHING)
    config = load_config(file, {"export.dtype": "bfloat16", "export.jobs": None})
    assert config.options.dtype == "bfloat16"
    assert config.origins["export.dtype"] == "--dtype"
    assert config.origins["export.jobs"] == f"{file}:16"
    assert config.origins["export.device"] == f"{file}:5"
    assert config.origins["io.1"] == f"{file}:33"
    assert config.origins["buckets.0"] == f"{file}:39"


def test_the_last_io_rule_is_the_flag(write) -> None:
    config = load_config(write(EVERYTHING), io=(("--io", parse_io("decode.cache=host")),))
    assert config.options.io[-1] == IoRule("both", "host", "decode", "cache")


def test_the_printed_configuration_reads_back_as_itself(write, tmp_path: Path) -> None:
    config = load_config(write(EVERYTHING), {"export.dtype": "float32"})
    again = tmp_path / "again.toml"
    again.write_text(config.toml())
    assert "# --dtype" in config.toml()
    read = load_config(str(again))
    assert read.options == config.options
    assert (read.output, read.max_copies) == (config.output, config.max_copies)


def test_fail_on_copy_is_a_budget_of_none() -> None:
    assert load_config(flags={"budget.fail-on-copy": True, "budget.copies": 7}).max_copies == 0


def test_native_is_the_gpu_that_is_present() -> None:
    config = load_config(flags={"export.arch": "sm_80,native"}, native=lambda: ("sm_90",))
    assert config.options.architectures == ("sm_80", "sm_90")
    assert load_config(native=lambda: ("sm_90",)).origins["export.arch"] == "the GPU present"
    with pytest.raises(UsageError, match="no GPU"):
        load_config(flags={"export.arch": "native"})


REFUSED = {
    "an unknown table": ("[exprot]\n", ["mine.toml:1", "did you mean `export`"]),
    "an unknown key": ("[export]\n\ndtyp = 1\n", ["mine.toml:3", "`dtyp`", "did you mean `dtype`"]),
    "a word of others": ('[export]\ndtype = "bf16"\n', ["mine.toml:2", "did you mean `bfloat16`"]),
    "an unknown word": ('[export]\ndtype = "float61"\n', ["mine.toml:2", "did you mean `float16`"]),
    "a text for a bool": ('[plan]\nreorder = "no"\n', ["mine.toml:2", "expected true or false"]),
    "a text for a count": ('[export]\njobs = "2"\n', ["expected a whole number"]),
    "a strange size": ('[budget]\nmemory = "2 apples"\n', ["`2GiB`"]),
    "a value for a table": ("plan = 3\n", ["expected a table `[plan]`"]),
    "a strange location": ('[io]\ndefault = "gpu"\n', ["`gpu` is no location", "`host`"]),
    "a placement key": ('[[placement]]\nmodul = "x"\n', ["unknown key `modul`", "did you mean `module`"]),
    "a placement without device": ('[[placement]]\nmodule = "x"\n', ["needs a `device`"]),
    "a pass that is no table": ("[pass]\nfold = 3\n", ["[pass.fold]"]),
    "a pipeline that is a text": ('pipeline = "fold"\n', ["expected a list of pass names"]),
    "a bucket of size 0": ("[buckets]\n\nbatch = [0]\n", ["mine.toml:1", "`batch`", "1 or more"]),
    "a bucket that is a text": ('[buckets]\nbatch = "8"\n', ["the sizes of `batch` must be whole numbers"]),
    "a bucket without sizes": ("[buckets]\nbatch = []\n", ["such as [1, 8, 32]"]),
    "what is no TOML": ("[export\n", ["it is not TOML"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_may_not_say_is_refused_by_name_and_line(write, case: str) -> None:
    text, parts = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        load_config(write(text))
    for part in parts:
        assert part in caught.value.line()


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        load_config(flags={"export.arch": "sm_91"}, architectures=("sm_80", "sm_90"))
    assert "known are sm_80, sm_90" in caught.value.line()
    assert "did you mean `sm_90`" in caught.value.line()


@pytest.mark.parametrize("spelled", ["90", "9.0", "sm90", "compute_90", "sm_90a"])
def test_an_architecture_that_is_spelled_otherwise_is_hinted_at(spelled: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(flags={"export.arch": spelled}, architectures=("sm_80", "sm_90"))
    assert caught.value.hint == "did you mean `sm_90`"


def test_device_io_without_device_planning_is_refused() -> None:
    with pytest.raises(UsageError, match="no-device-planning"):
        load_config(flags={"plan.device-planning": False}, io=(("--io", parse_io("device")),))


def test_constants_left_in_files_need_the_files() -> None:
    for flags in ({"export.weights": "reference"}, {"export.weights-file": "w.safetensors"}):
        with pytest.raises(UsageError, match="without each other"):
            load_config(flags=flags)


def test_the_committed_schema_is_that_of_the_settings() -> None:
    assert json.loads((CONFIGS / "devplan.schema.json").read_text()) == json.loads(
        json.dumps(config_schema())
    )


@pytest.mark.parametrize("text", [EVERYTHING, *(file.read_text() for file in sorted(CONFIGS.glob("*.toml")))])
def test_good_configurations_satisfy_the_schema(text: str) -> None:
    document = json.loads(json.dumps(tomllib.loads(text)).replace('"allow_tf32"', '"allow-tf32"'))
    jsonschema.validate(document, config_schema())


def test_a_missing_file_suggests_a_ready_one() -> None:
    with pytest.raises(UsageError) as caught:
        load_config("defalt")
    assert "did you mean `default`" in caught.value.line()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("device", IoRule("both", "device")),
        ("prefill=device", IoRule("both", "device", "prefill")),
        ("prefill.tokens=device", IoRule("both", "device", "prefill", "tokens")),
        ("decode.cache.0=host", IoRule("both", "host", "decode", "cache.0")),
    ],
)
def test_io_flags(text: str, rule: IoRule) -> None:
    assert parse_io(text) == rule


@pytest.mark.parametrize("text", ["", "gpu", "=device", "prefill=", "prefill.tokens"])
def test_bad_io_flags(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|location"):
        parse_io(text)


def test_skip_flags() -> None:
    assert parse_skip("h2d", "*") == IoRule("h2d", "device")
    assert parse_skip("d2h", "decode.logits") == IoRule("d2h", "device", "decode", "logits")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("batch=1,8,32", BucketRule("batch", (1, 8, 32))),
        ("batch=8", BucketRule("batch", (8,))),
        ("x:0= 8, 1 ,8", BucketRule("x:0", (1, 8))),
        ("prefill.tokens:1=128", BucketRule("prefill.tokens:1", (128,))),
    ],
)
def test_bucket_flags(text: str, rule: BucketRule) -> None:
    assert parse_bucket(text) == rule


@pytest.mark.parametrize("text", ["", "batch", "batch=", "=8", "batch=0", "batch=-1", "batch=8,", "batch=a"])
def test_bad_bucket_flags(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected `DIMENSION=SIZE,SIZE`|1 or more"):
        parse_bucket(text)


def test_buckets_of_flags_come_after_those_of_the_file(write) -> None:
    config = load_config(write(EVERYTHING), buckets=(("--buckets batch=2", parse_bucket("batch=2")),))
    assert config.options.buckets[-1] == BucketRule("batch", (2,))
    assert config.origins["buckets.3"] == "--buckets batch=2"
    assert '"batch" = [2]' in config.toml()


@given(st.integers(0, 1 << 50))
def test_a_number_of_bytes_is_a_size(number: int) -> None:
    assert parse_size(str(number)) == parse_size(number) == number
    assert parse_size(f"{number}KiB") == number * 1024 == parse_size(f"{number} kib")
    assert parse_size(f"{number}kB") == number * 1000


def test_a_size_may_have_a_fraction() -> None:
    assert parse_size("1.5GiB") == 3 << 29


def test_an_unknown_pass_is_refused_before_anything_is_imported(write) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(write('pipeline = ["insert-copys"]'))
    assert "did you mean `insert-copies`?" in caught.value.hint


@pytest.mark.parametrize(
    ("pipeline", "what"),
    [
        ("[]", "lacks `place-operators`, `insert-copies`, `group-regions`"),
        ('["place-operators", "insert-copies"]', "lacks `group-regions`"),
        (
            '["group-regions", "place-operators", "insert-copies"]',
            "pass `place-operators` cannot come after `group-regions`",
        ),
    ],
)
def test_a_pipeline_that_makes_no_program_is_refused(write, pipeline: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(write(f"pipeline = {pipeline}"))
    assert what in str(caught.value)
    assert "`place-operators`, `insert-copies`, `group-regions`" in caught.value.hint


def test_a_pass_of_the_users_own_may_stand_for_one_that_is_needed(write, tmp_path: Path) -> None:
    (tmp_path / "my_pass.py").write_text("")
    assert load_config(write('pipeline = ["my_pass.py:Place", "insert-copies", "group-regions"]'))


def test_a_pass_of_the_users_own_is_found_beside_the_configuration(write, tmp_path: Path) -> None:
    (tmp_path / "my_pass.py").write_text("")
    (entry,) = load_config(write('pipeline = ["my_pass.py:Mine"]')).options.pipeline or ()
    assert entry == f"{tmp_path / 'my_pass.py'}:Mine"
    with pytest.raises(UsageError, match=r"no file `gone.py`"):
        load_config(write('pipeline = ["gone.py:Mine"]'))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("int5", "expected `int8-weight-only`, `int4-weight-only` or `int4-weight-only:GROUP`"),
        ("int4-weight-only:100", "a group has 32, 64, 128 or 256 columns"),
        ("int8-weight-only:32", "int8 has one scale for each row and takes no group"),
    ],
)
def test_a_scheme_that_there_is_not_is_refused_with_those_that_there_are(text: str, why: str) -> None:
    with pytest.raises(UsageError, match="cannot use `--quantize") as caught:
        load_config(None, {"export.quantize": text})
    assert caught.value.why == why


def test_packed_weights_need_a_gpu() -> None:
    with pytest.raises(UsageError, match="`--quantize` with `--device cpu`"):
        load_config(None, {"export.quantize": "int8-weight-only", "export.device": "cpu"})
