"""Evaluation: real decoding, its figures, and what is kept of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_drafter
from tiny_run import TinyRun, make_run, write_conversations

from dflash import evaluate as V
from dflash import measure as M
from dflash.decode import Decoded, Round, Verdict
from dflash.export import export
from dflash.model import FrozenEnds
from dflash.prepare import load_tokenizer
from dflash.walk import text_states, walk, walk_chain


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def record(run: TinyRun) -> dict[str, Any]:
    return json.loads((run.path / "eval" / "step_3.json").read_text())


# --- figures --------------------------------------------------------------------------------------


def result(accepted: list[int], walked: list[int], seconds: float, kind: str) -> M.PromptResult:
    """A text of sum(accepted + 1) + 1 tokens, drafted in blocks of 4 in `seconds`, plain in 10."""
    tokens = [5] * (1 + sum(n + 1 for n in accepted))
    rounds = tuple(Round(n, 3) for n in accepted)
    return M.PromptResult(
        prompt_tokens=7,
        plain=Decoded(tokens, 1.0, 10.0),
        drafted=Decoded(tokens, 1.0, seconds, rounds),
        walked={"tau_walk": walked, "ddtree_len@16": [n + 1 for n in walked]},
        verdict=Verdict(kind),  # type: ignore[arg-type]
    )


def test_figures_are_pooled_over_rounds_and_seconds_not_averaged_over_prompts() -> None:
    results = [
        result([3, 3, 3], [3, 3, 3], 2.0, "identical"),  # 12 tokens after the prefill's
        result([0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], 4.0, "tie"),  # 6
        result([], [], 0.0, "different"),
    ]
    figures = M.summarise(results, block_size=4)
    assert figures["rounds"] == 8 and figures["new_tokens"] == 13 + 7 + 1
    assert figures["tau"] == 18 / 8
    assert figures["tau_walk"] == (12 + 6) / 9
    assert figures["ddtree_len@16"] == (12 + 6 + 9) / 9
    assert figures["walk_equal"] == 2
    assert figures["acceptance"] == [4 / 8, 3 / 8, 3 / 8]
    assert figures["plain_tok_per_s"] == pytest.approx(18 / 30)
    assert figures["drafted_tok_per_s"] == pytest.approx(18 / 6)
    assert figures["speedup"] == pytest.approx(5.0)
    assert figures["lossless"] == {"identical": 1, "tie": 1, "different": 1}
    assert json.loads(json.dumps(figures))["per_prompt"][2]["tau"] is None


def test_a_cut_last_round_is_not_held_against_the_slots_it_never_judged() -> None:
    rounds = [Round(accepted=3, judged=3), Round(accepted=1, judged=1), Round(0, 3)]
    assert M.acceptance_by_position(rounds, 5) == [2 / 3, 1 / 2, 1 / 2, None]


def test_the_walk_reads_proposals_against_the_text() -> None:
    tokens = [10, 11, 12, 13, 14, 15]
    proposals_PJ = torch.tensor(
        [[11, 12, 99], [99, 13, 14], [13, 99, 15], [99] * 3, [15, 16, 17]]  # at 10, 11, 12, 13, 14
    )
    # From 10: 11, 12 right, then the bonus 13; from 13: nothing, bonus 14; from 14: 15, the end.
    assert walk_chain(proposals_PJ, tokens) == [2, 0, 1]


def test_a_drafter_trained_on_one_text_is_accepted_whole_and_the_walk_agrees(
    tmp_path: Path,
) -> None:
    """Training's masks, positions and taps are decoding's, or an overfitted drafter fails here."""
    tiny = make_run(tmp_path, train_steps=80)
    prompt = load_tokenizer(tiny.target.directory)("w4 w10 w11 w12 w5")["input_ids"]
    subject = V.open_subject(tiny.path)
    drafter = V.build_drafter(subject.arch, subject.weights, torch.float32)
    results = M.decode_prompts(tiny.target, drafter, tiny.target.ends(), [prompt], 41, stop=())
    figures = M.summarise(results, subject.arch.block_size)
    assert figures["lossless"]["identical"] == 1
    assert figures["tau"] > 3.5 and figures["acceptance"][0] > 0.9
    assert figures["tau_walk"] == figures["tau"] and figures["walk_equal"] == 1


def test_an_unexplained_difference_is_counted_and_told(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Verdict("different", position=4, gap=1.5, ulp=0.125)
    monkeypatch.setattr(M, "compare", lambda *_: wrong)
    assert V.main([str(run.path), "--again"]) == 1
    shown = capsys.readouterr().out
    assert "different at new token 4 (logits 1.5 apart, one rounding step is 0.125)" in shown
    assert "0 identical to plain decoding, 0 explained by ties, 3 NOT explained" in shown


# --- the command ----------------------------------------------------------------------------------


def test_a_run_is_evaluated_on_its_heldout_prompts_and_the_result_kept(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert V.main([str(run.path), "--again", "--json", str(tmp_path / "copy.json")]) == 0
    shown = capsys.readouterr().out
    kept = record(run)
    assert kept == json.loads((tmp_path / "copy.json").read_text())
    assert kept["lossless"] == {"identical": 3, "tie": 0, "different": 0}
    assert (kept["step"], kept["data"], kept["num_prompts"]) == (3, "held-out", 3)
    assert kept["tau"] >= 1 and kept["tau"] == kept["tau_walk"]
    assert len(kept["acceptance"]) == 3 and len(kept["per_prompt"]) == 3
    assert "lossless  3 identical" in shown and f"tau       {kept['tau']:.2f} tokens" in shown
    assert shown.count("\n") < 25

    assert V.main([str(run.checkpoint)]) == 0  # the same drafter by another path
    again = capsys.readouterr().out
    assert "already measured with these settings" in again and "lossless  3 identical" in again
    assert record(run) == kept


def test_other_settings_are_another_question(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert V.main([str(run.path), "--prompts", "1", "--max-new-tokens", "5"]) == 0
    assert "already measured" not in capsys.readouterr().out
    assert record(run)["num_prompts"] == 1 and record(run)["max_new_tokens"] == 5


def test_prompts_may_come_from_a_file(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_conversations(tmp_path / "other.jsonl", count=2)
    data.write_text(data.read_text() * 2)  # a prompt that is there twice is one prompt
    assert V.main([str(run.path), "--data", str(data), "--max-new-tokens", "4"]) == 0
    kept = record(run)
    assert (kept["data"], kept["num_prompts"]) == ("other.jsonl", 2)
    capsys.readouterr()


def test_an_exported_directory_is_evaluated_as_it_is_shipped(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(run.path, tmp_path / "out")
    assert V.main([str(tmp_path / "out"), "--max-new-tokens", "6"]) == 0
    kept = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert kept["lossless"]["identical"] == 3 and kept["step"] == 3
    capsys.readouterr()

    (tmp_path / "out" / "export.json").unlink()  # somebody else's: nothing is known about it
    assert V.main([str(tmp_path / "out")]) == 2
    assert "which target is it for? Say it with --target" in capsys.readouterr().err
    target = str(run.target.directory)
    assert V.main([str(tmp_path / "out"), "--target", target]) == 2
    assert "say which prompts with --data FILE" in capsys.readouterr().err
    data = str(write_conversations(tmp_path / "x.jsonl", count=1))
    options = ["--target", target, "--data", data, "--max-new-tokens", "4"]
    assert V.main([str(tmp_path / "out"), *options]) == 0


def test_a_drafter_scales_as_its_own_config_says(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run.path, tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert run.target.arch.embed_scale == 1 and run.target.arch.logit_softcap is None
    raw["dflash_config"] |= {"input_embedding_scale": 3.0, "final_logit_softcapping": 20.0}
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    seen, decode_prompts = [], V.decode_prompts

    def watch(target: Any, drafter: Any, ends: FrozenEnds, *rest: Any) -> Any:
        seen.append((ends.embed_scale, ends.logit_softcap))
        return decode_prompts(target, drafter, ends, *rest)

    monkeypatch.setattr(V, "decode_prompts", watch)
    assert V.main([str(tmp_path / "out"), "--max-new-tokens", "4", "--prompts", "1"]) == 0
    assert seen == [(3.0, 20.0)]


def test_mistakes_are_one_line(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    other = make_run(tmp_path / "o", arch_changes={"num_target_layers": 9})
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "no such directory"),
        ([str(tmp_path / "empty")], "no complete checkpoint here"),
        ([str(run.path), "--data", str(tmp_path / "no.jsonl")], "no such file"),
        ([str(run.path), "--prompts", "0"], "--prompts: 0: must be at least 1"),
        ([str(run.path), "--max-new-tokens", "600"], "no prompt leaves room for 600 new tokens"),
        ([str(run.path), "--tree", "0"], "--tree: 0: must be at least 1"),
        ([str(run.path), "--temperature", "-1"], "--temperature: -1.0: must be 0 .greedy. or more"),
        ([str(run.path), "--seed", "1"], "--seed has no effect at temperature 0"),
        ([str(other.path)], "not a drafter for .*: num_target_layers 9 and 4"),
    ):
        assert V.main(arguments) == 2
        shown = capsys.readouterr()
        assert re.search(message, shown.err), shown.err
        assert shown.err.count("\n") == 1


def test_the_walk_of_a_single_token_is_empty(run: TinyRun) -> None:
    states_TF = text_states(run.target, [5, 6, 7, 8])
    lengths = walk(random_drafter(run.arch), run.target.ends(), states_TF, [5, 6, 7], [8])
    assert lengths == {"tau_walk": [], "ddtree_len@16": [], "ddtree_len@64": []}


# --- trees, samples, several sets -----------------------------------------------------------------


def test_a_tree_is_measured_beside_the_chain_and_kept_beside_it(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert V.main([str(run.path), "--again"]) == 0
    assert V.main([str(run.path), "--tree", "8"]) == 0
    shown = capsys.readouterr().out
    kept = json.loads((run.path / "eval" / "step_3-tree8.json").read_text())
    assert kept["tau"] == kept["ddtree_len@8"] >= kept["tau_walk"] == record(run)["tau"]
    assert kept["walk_equal"] == kept["lossless"]["identical"] == 3
    assert "trees of 8 nodes, greedy" in shown and "ddtree_len@8" in shown
    assert record(run)["tree"] is None


def test_sampled_text_has_a_speed_and_a_tau_but_no_verdict(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert V.main([str(run.path), "--temperature", "0.7", "--seed", "2"]) == 0
    shown = capsys.readouterr().out
    kept = json.loads((run.path / "eval" / "step_3-t0.7.json").read_text())
    assert kept["tau"] >= 1 and kept["lossless"] is None and kept["walk_equal"] is None
    assert "tau_walk" not in kept and "walked" not in shown
    assert "sampled at temperature 0.7 (seed 2)" in shown and "not compared" in shown


def test_several_prompt_sets_are_a_row_each_and_a_total(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (tmp_path / name for name in ("one.jsonl", "two.jsonl"))
    write_conversations(one, count=2)
    write_conversations(two, count=5)
    options = ["--data", str(one), "--data", str(two), "--prompts", "3", "--max-new-tokens", "6"]
    assert V.main([str(run.path), *options]) == 0
    shown, kept = capsys.readouterr().out, record(run)
    assert [(row["data"], row["num_prompts"]) for row in kept["sets"]] == [
        ("one.jsonl", 2),
        ("two.jsonl", 3),
    ]
    assert kept["num_prompts"] == 5 and kept["data"] == "one.jsonl, two.jsonl"
    assert kept["rounds"] == sum(row["rounds"] for row in kept["sets"])
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if row and row[-1] == "identical"][-3:] == [
        "one.jsonl",
        "two.jsonl",
        "together",
    ]
    assert V.main([str(run.path), *options]) == 0
    assert "already measured" in capsys.readouterr().out


def test_eval_may_decode_in_a_dtype_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, dtype="bfloat16", eval_changes={"dtype": "float32"})
    V.run(V.parse_arguments([str(run.path)]))
    kept = record(run)
    assert (kept["dtype"], kept["drafter_dtype"]) == ("float32", "float32")
    assert kept["lossless"] == {"identical": 3, "tie": 0, "different": 0}
