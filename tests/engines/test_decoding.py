"""The decoding loop on small random models: every mode is exact, in every batch, at every limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import heads_zoo
import numpy as np
import pytest
import torch
import zoo
from transformers import PreTrainedModel

from engines.bundle import DynamicTree, EngineFacts, LookaheadSize, StaticTree
from engines.decoding import Completion, Decoder, FinishReason, Request, RequestError
from engines.exactness import compare_greedy
from engines.sampling import SamplingParams
from engines.sessions.onnxruntime import OnnxSession

MAX_SEQ_LEN = 96
GAMMA = 8
VOCABULARY = 29
# Wide at the top: with this few tokens, a random head's tree often holds the right one.
TREE = StaticTree(
    choices=(
        *((i,) for i in range(14)),
        *((i, j) for i in range(4) for j in range(6)),
        *((0, i, 0) for i in range(6)),
        (1, 0, 0),
        (0, 0, 0, 0),
    )
)
DRAWN = StaticTree(choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)), drawn=True)
# name -> method, options of `zoo.make_session`, head
MODES: dict[str, tuple[str, dict[str, object], str]] = {
    "ngram": ("ngram", {}, ""),
    "lookahead": ("lookahead", {"gamma": 4, "lookahead": LookaheadSize(window=4, ngram=3, guesses=4)}, ""),
    # The deepest trees that the engine's encoding sees through: W + N - 3 = 32 levels.
    "lookahead-deep": (
        "lookahead",
        {"gamma": 32, "lookahead": LookaheadSize(window=32, ngram=3, guesses=1)},
        "",
    ),
    "draft_model": ("draft_model", {}, "noisy"),
    "layer_skip": ("layer_skip", {"exit_layer": 5}, ""),
    "medusa": ("medusa", {"gamma": 4}, "medusa"),
    "medusa-tree": ("medusa", {"gamma": 4, "tree": TREE}, "medusa"),
    "eagle": ("eagle", {}, "eagle"),
    "eagle-tree": ("eagle", {"gamma": 4, "tree": TREE}, "eagle"),
    "eagle-drawn": ("eagle", {"gamma": 4, "tree": DRAWN}, "eagle"),
    "eagle3": ("eagle3", {}, "eagle3"),
    "eagle3-dynamic": ("eagle3", {"gamma": 3, "tree": DynamicTree(top_k=6, nodes=40)}, "eagle3"),
}
METHODS = list(MODES)
CHAIN = [(0,) * n for n in range(1, GAMMA + 1)]
# Drafts are point masses: a seeded run must equal the seeded plain run token for token.
POINT_MASSES = [
    "ngram",
    "lookahead",
    "lookahead-deep",
    "medusa",
    "medusa-tree",
    "eagle-tree",
    "eagle3-dynamic",
]
Loaded = tuple[OnnxSession, EngineFacts]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Loaded]]:
    """One engine a mode. The draft model is the target with noise; heads are random."""
    root = tmp_path_factory.mktemp("engines")
    model = make_model()
    target = zoo.save(model, root / "target")
    heads = {
        "": None,
        "noisy": zoo.save(zoo.disturbed(make_model(), noise=0.02), root / "noisy"),
        "medusa": heads_zoo.make_medusa(model, root / "medusa", heads=4),
        "eagle": heads_zoo.make_eagle(model, root / "eagle"),
        "eagle3": heads_zoo.make_eagle3(model, root / "eagle3", draft_vocab=23),
    }
    made = {}
    for name, (method, options, head) in MODES.items():
        values: dict[str, object] = {"gamma": GAMMA, "max_seq_len": MAX_SEQ_LEN, **options}
        made[name] = zoo.make_session(
            target, root / f"engine-{name}", method=method, drafter=heads[head], **values
        )  # type: ignore[arg-type]
    return made


def make_model() -> PreTrainedModel:
    return heads_zoo.make_deep_model(6, vocab_size=VOCABULARY)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged; the second half of each repeats its first, so that n-grams match."""
    rng = np.random.default_rng(seed)
    halves = [rng.integers(3, VOCABULARY, rng.integers(1, 14)).tolist() for _ in range(count)]
    return [half + half for half in halves]


def run(loaded: Loaded, requests: list[Request]) -> list[Completion]:
    return Decoder(*loaded).run(requests)


def assert_same(loaded: Loaded, request: Request, plain: list[int], other: list[int]) -> None:
    """The margin rule."""
    session, facts = loaded

    def gap(i: int) -> float:
        logits = np.sort(Decoder(session, facts).next_logits([*request.prompt, *plain[:i]]))
        return float(logits[-1] - logits[-2])

    found = compare_greedy(plain, other, gap, facts.margin_tolerance)
    assert found is None or found.allowed, found


@pytest.mark.parametrize(
    ("method", "gamma"),
    [(m, g) for m, (_, options, _) in MODES.items() for g in range(1, int(options.get("gamma", GAMMA)) + 1)],  # type: ignore[call-overload]
)
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_speculation_equals_plain_decoding(
    engines: dict[str, Loaded], method: str, gamma: int, batch: int
) -> None:
    asked = prompts(8, seed=gamma)
    plain = [run(engines[method], [Request(p, 24, gamma=0)])[0].tokens for p in asked]
    for start in range(0, len(asked), batch):
        requests = [Request(p, 24, gamma=gamma) for p in asked[start : start + batch]]
        found = run(engines[method], requests)
        for request, expected, got in zip(requests, plain[start:], found, strict=False):
            assert_same(engines[method], request, expected, got.tokens)
            assert got.acceptance.drafted > 0 or method == "ngram"


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_accepted_and_rejected(engines: dict[str, Loaded], method: str) -> None:
    """Else the other tests would compare plain decoding with itself."""
    stats = [c.acceptance for c in run(engines[method], [Request(p, 40) for p in prompts(8, seed=21)])]
    assert sum(s.accepted for s in stats) > 0
    assert sum(s.rejections for s in stats) > 0
    if MODES[method][1].get("tree") and method != "eagle-drawn":
        assert sum(s.accepted_at[1] for s in stats) > 0  # paths of more than one node were compacted


def test_plain_decoding_equals_transformers(engines: dict[str, Loaded]) -> None:
    model = make_model()
    for prompt in prompts(3, seed=11):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        request = Request(prompt, 30, gamma=0)
        assert_same(engines["ngram"], request, expected, run(engines["ngram"], [request])[0].tokens)


@pytest.mark.parametrize("method", METHODS)
def test_more_requests_than_slots(engines: dict[str, Loaded], method: str) -> None:
    """Sequences join and leave at different times; none sees another."""
    asked = prompts(11, seed=5)
    lengths = [3, 30, 1, 12, 25, 2, 18, 9, 27, 5, 14]
    requests = [Request(p, n) for p, n in zip(asked, lengths, strict=True)]
    together = run(engines[method], requests)
    for request, got in zip(requests, together, strict=True):
        alone = run(engines[method], [request])[0]
        assert got.reason is alone.reason
        assert_same(engines[method], request, alone.tokens, got.tokens)


@pytest.mark.parametrize("method", METHODS)
def test_seeded_results_do_not_depend_on_the_batch(engines: dict[str, Loaded], method: str) -> None:
    requests = [
        Request(p, 24, sampling=SamplingParams(0.9, 20, 0.95, seed=3), sequence=i)
        for i, p in enumerate(prompts(8, seed=7))
    ]
    together = run(engines[method], requests)
    alone = [run(engines[method], [request])[0] for request in requests]
    assert [c.tokens for c in together] == [c.tokens for c in alone]


@pytest.mark.parametrize("method", POINT_MASSES)
def test_seeded_point_masses_equal_seeded_plain_decoding(engines: dict[str, Loaded], method: str) -> None:
    """Their drafts are matched against the very token that plain decoding would have drawn."""
    for i, prompt in enumerate(prompts(4, seed=8)):
        sampling = SamplingParams(0.7, seed=i)
        plain = run(engines[method], [Request(prompt, 32, sampling=sampling, gamma=0)])[0]
        drafted = run(engines[method], [Request(prompt, 32, sampling=sampling)])[0]
        assert plain.tokens == drafted.tokens


@pytest.mark.parametrize("method", METHODS)
def test_mixed_greedy_and_sampled_batch(engines: dict[str, Loaded], method: str) -> None:
    asked = prompts(4, seed=9)
    hot = SamplingParams(1.2, seed=1)
    mixed = [Request(p, 20, sampling=hot if i % 2 else SamplingParams()) for i, p in enumerate(asked)]
    for request, got in zip(mixed, run(engines[method], mixed), strict=True):
        assert run(engines[method], [request])[0].tokens == got.tokens


@pytest.mark.parametrize("method", METHODS)
def test_speculation_off_and_on_within_one_engine(engines: dict[str, Loaded], method: str) -> None:
    """A plain request lets the drafter's cache lag; a speculating one beside it is not disturbed."""
    asked = prompts(4, seed=12)
    most = engines[method][1].gamma
    mixed = [Request(p, 30, gamma=g) for p, g in zip(asked, [0, min(5, most), 2, 0], strict=True)]
    for request, got in zip(mixed, run(engines[method], mixed), strict=True):
        plain = run(engines[method], [Request(request.prompt, 30, gamma=0)])[0]
        assert_same(engines[method], request, plain.tokens, got.tokens)


@pytest.mark.parametrize("method", METHODS)
def test_context_limit(engines: dict[str, Loaded], method: str) -> None:
    full = [int(t) for t in np.random.default_rng(1).integers(3, VOCABULARY, MAX_SEQ_LEN)]
    at_limit, one_less, some = run(engines[method], [Request(full), Request(full[:-1]), Request(full[:80])])
    assert (at_limit.tokens, at_limit.reason) == ([], FinishReason.LENGTH)
    assert len(one_less.tokens) == 1
    assert len(some.tokens) == MAX_SEQ_LEN - 80
    with pytest.raises(RequestError, match="97 tokens"):
        run(engines[method], [Request([*full, 5])])


@pytest.mark.parametrize("method", METHODS)
def test_stop_at_the_first_token_and_inside_accepted_drafts(engines: dict[str, Loaded], method: str) -> None:
    prompt = prompts(1, seed=3)[0]
    plain = run(engines[method], [Request(prompt, 30, gamma=0)])[0].tokens
    first = run(engines[method], [Request(prompt, 30, stop_tokens=frozenset({plain[0]}))])[0]
    assert (first.tokens, first.reason) == ([], FinishReason.STOP_TOKEN)
    for stop in plain:
        got = run(engines[method], [Request(prompt, 30, stop_tokens=frozenset({stop}))])[0]
        assert got.tokens == plain[: plain.index(stop)]
        assert got.reason is FinishReason.STOP_TOKEN


def test_empty_output_and_single_token_prompt(engines: dict[str, Loaded]) -> None:
    for loaded in engines.values():
        nothing, one = run(loaded, [Request([5], 0), Request([5], 1)])
        assert (nothing.tokens, nothing.reason) == ([], FinishReason.LENGTH)
        assert len(one.tokens) == 1
        assert len(run(loaded, [Request([5], 12)])[0].tokens) == 12


def test_callback_streams_every_token_once_and_can_stop(engines: dict[str, Loaded]) -> None:
    decoder = Decoder(*engines["ngram"])
    seen: list[int] = []

    def take(tokens: list[int]) -> bool:
        seen.extend(tokens)
        return len(seen) >= 10

    request_id = decoder.submit(Request(prompts(1)[0], 40), take)
    done: dict[int, Completion] = {}
    while decoder.busy:
        done.update(decoder.step())
    assert done[request_id].tokens == seen
    assert done[request_id].reason is FinishReason.STOP_TEXT
    assert len(seen) == 10  # wherever a step's accepted tokens end


def test_cancelled_request_frees_its_slot(engines: dict[str, Loaded]) -> None:
    decoder = Decoder(*engines["layer_skip"])
    asked = [Request(p, 40) for p in prompts(10, seed=2)]
    ids = [decoder.submit(request) for request in asked]
    done = decoder.step()
    decoder.cancel(ids[1])
    decoder.cancel(ids[9])
    while decoder.busy:
        done.update(decoder.step())
    assert done[ids[1]].reason is FinishReason.CANCELLED
    assert done[ids[9]].tokens == []
    for i in (0, *range(2, 9)):
        assert done[ids[i]].tokens == run(engines["layer_skip"], [asked[i]])[0].tokens


HEADS = ["medusa", "medusa-tree", "eagle", "eagle-tree", "eagle3", "eagle3-dynamic"]


@pytest.mark.parametrize("method", HEADS)
def test_heads_draft_behind_every_text_what_their_reference_drafts(
    engines: dict[str, Loaded], method: str, tmp_path: Path
) -> None:
    """As many steps as with plain torch drafts: hidden states, caches and paths follow what was accepted.

    A wrong one leaves the text as it is, and costs acceptance only.
    """
    model, (_, facts) = make_model(), engines[method]
    asked = [Request(p, 24) for p in prompts(6, seed=5)]
    done = run(engines[method], asked)
    plain = [c.tokens for c in run(engines["ngram"], [replace(r, gamma=0) for r in asked])]
    assert [c.tokens for c in done] == plain
    drafted = paths_by_reference(model, method, facts, tmp_path)
    taken = set()
    for request, completion in zip(asked, done, strict=True):
        text, steps = [*request.prompt, completion.tokens[0]], 0
        truth = [*request.prompt, *completion.tokens]
        while len(text) < len(truth):
            ahead = truth[len(text) :]
            right = max((len(p) for p in drafted(text) if list(p) == ahead[: len(p)]), default=0)
            text += ahead[: right + 1]
            steps += 1
            taken.add(right)
        assert completion.acceptance.steps == steps
    assert {0, 1} <= taken
    if "tree" in method or "dynamic" in method:
        assert max(taken) >= 2


def paths_by_reference(
    model: PreTrainedModel, method: str, facts: EngineFacts, folder: Path
) -> Callable[[list[int]], set[tuple[int, ...]]]:
    """What a head drafts behind a text: all paths of its tree, as tokens."""
    if method.startswith("medusa"):
        medusa = heads_zoo.MedusaReference(heads_zoo.make_medusa(model, folder, heads=4), model)

        def by_medusa(text: list[int]) -> set[tuple[int, ...]]:
            hidden = heads_zoo.target_features(model, text[:-1])[-1]
            order = medusa.logits(hidden).argsort(-1, descending=True)
            choices = facts.tree.choices if isinstance(facts.tree, StaticTree) else CHAIN[: facts.gamma]
            return {tuple(int(order[d, r]) for d, r in enumerate(choice)) for choice in choices}

        return by_medusa
    if method.startswith("eagle3"):
        head = heads_zoo.make_eagle3(model, folder, draft_vocab=23)
        layers = model.config.num_hidden_layers
        taps: tuple[int, ...] = (2, layers // 2, layers - 3)
    else:
        head, taps = heads_zoo.make_eagle(model, folder), ()
    eagle = heads_zoo.EagleReference(head, model)

    def by_eagle(text: list[int]) -> set[tuple[int, ...]]:
        root = eagle.root(text, heads_zoo.target_features(model, text[:-1], taps))
        if isinstance(facts.tree, DynamicTree):
            return heads_zoo.naive_dynamic_tree(eagle, root, facts.gamma, facts.tree.top_k, facts.tree.nodes)
        choices = facts.tree.choices if isinstance(facts.tree, StaticTree) else CHAIN[: facts.gamma]
        nodes, paths = {(): root}, {(): ()}
        for choice in sorted(choices, key=len):
            above = tuple(choice[:-1])
            token = eagle.best(nodes[above], choice[-1] + 1)[-1]
            paths[choice] = (*paths[above], token)
            nodes[choice] = eagle.child(nodes[above], token)
        return set(paths.values()) - {()}

    return by_eagle


@pytest.mark.parametrize("method", ["lookahead", "lookahead-deep"])
def test_lookahead_drafts_no_more_levels_than_asked(engines: dict[str, Loaded], method: str) -> None:
    for gamma in (0, 1, 3):
        (done,) = run(engines[method], [Request([5, 6, 7] * 3, 20, gamma=gamma)])
        assert sum(done.acceptance.drafted_at[gamma:]) == 0
        assert done.acceptance.mean_acceptance_length <= gamma + 1


@pytest.mark.parametrize("method", ["ngram", "lookahead", "eagle-tree", "eagle-drawn"])
def test_a_threshold_is_refused_where_drafts_have_no_confidence(
    engines: dict[str, Loaded], method: str
) -> None:
    with pytest.raises(RequestError, match="have no confidence"):
        run(engines[method], [Request([5], 4, confidence_threshold=0.5)])


@pytest.mark.parametrize("method", ["medusa-tree", "eagle", "eagle3-dynamic"])
def test_a_threshold_of_one_stops_all_drafts(engines: dict[str, Loaded], method: str) -> None:
    (done,) = run(engines[method], [Request([5, 6, 7], 12, confidence_threshold=1.0)])
    assert sum(done.acceptance.drafted_at) == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "the prompt is empty"),
        (Request([VOCABULARY]), f"token id {VOCABULARY}"),
        (Request([-1]), "token id -1"),
        (Request([5], -1), "max_new_tokens = -1"),
        (Request([5], gamma=GAMMA + 1), "γ = 9"),
        (Request([5], gamma=-1), "γ = -1"),
    ],
)
def test_bad_requests_are_refused(engines: dict[str, Loaded], request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run(engines["ngram"], [request_])


def test_greedy_engine_refuses_sampling(engines: dict[str, Loaded]) -> None:
    session, facts = engines["ngram"]
    greedy = facts.model_copy(update={"verification": "greedy"})
    with pytest.raises(RequestError, match=r"temperature 0\.5"):
        Decoder(session, greedy).run([Request([5], 3, sampling=SamplingParams(0.5))])
