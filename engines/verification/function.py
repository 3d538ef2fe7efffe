"""Verification as ONNX functions: the definition of `reference`, token for token, in standard operators.

The functions are written in ONNX's textual form; a runtime inlines their bodies where a graph calls
them. Only operators that onnxruntime and TensorRT both take are used. In a batch that is all greedy
nothing but the argmax runs, and nothing is sorted unless a sequence of the batch asks for top-k or top-p.
One limit: TensorRT's TopK ranks at most 3840 tokens, so with a wider vocabulary these bodies do not
build there, and a plugin of the same definition has to take their place.

    VerifyChain(target_logits, draft_tokens, draft_counts,
                temperature, top_k, top_p, uniforms) -> accepted, tokens, finite
    VerifyChainSampled(target_logits, draft_tokens, draft_counts, draft_logits,
                temperature, top_k, top_p, uniforms) -> accepted, tokens, finite
    DrawToken(logits, temperature, top_k, top_p, u) -> tokens

Shapes and meaning are those of `reference.verify_chain` and `reference.draw_tokens`.
"""

from __future__ import annotations

from itertools import pairwise

import onnx

from engines.sampling import EXP_COEFFICIENTS, EXP_FLOOR, EXP_SQUARINGS, WEIGHT_SCALE
from engines.uniforms import ACCEPT, DRAFT, SAMPLE
from engines.verification import tree_function
from engines.verification.domain import DOMAIN, OPSET, VERSION, Graph, parse
from engines.verification.reference import RESIDUAL_SCALE
from engines.verification.tree_function import tree_encoding, verify_tree, verify_typical

__all__ = [
    "ACCEPT",
    "DOMAIN",
    "DRAFT",
    "DRAW_TOKEN",
    "OPSET",
    "SAMPLE",
    "VERIFY_CHAIN",
    "VERIFY_CHAIN_SAMPLED",
    "VERSION",
    "draw_token",
    "functions",
    "tree_encoding",
    "verify_chain",
    "verify_tree",
    "verify_typical",
]

VERIFY_CHAIN = "VerifyChain"
VERIFY_CHAIN_SAMPLED = "VerifyChainSampled"
DRAW_TOKEN = "DrawToken"

# How many of the most likely tokens are ranked where top-k or top-p is asked for, one after the other
# until that settles every row; at last the whole vocabulary, which takes 20 times as long as the first.
RANKED = (512, 8192)


def verify_chain(
    graph: Graph,
    target_logits: str,
    draft_tokens: str,
    draft_counts: str,
    draft_logits: str,
    temperature: str,
    top_k: str,
    top_p: str,
    uniforms: str,
) -> tuple[str, str, str]:
    """Emit the call that verifies a chain; `draft_logits` is empty for point-mass drafts.

    Returns:
        The names of accepted i64 [B], tokens i64 [B, R], finite bool [B].
    """
    operands = [target_logits, draft_tokens, draft_counts]
    operands += [draft_logits] if draft_logits else []
    operands += [temperature, top_k, top_p, uniforms]
    op_type = VERIFY_CHAIN_SAMPLED if draft_logits else VERIFY_CHAIN
    accepted, tokens, finite = graph.multi(op_type, *operands, outputs=3, domain=DOMAIN)
    return accepted, tokens, finite


def draw_token(graph: Graph, logits: str, temperature: str, top_k: str, top_p: str, u: str) -> str:
    """Emit the call that draws one token a sequence; returns the name of i64 [B]."""
    return graph.multi(DRAW_TOKEN, logits, temperature, top_k, top_p, u, outputs=1, domain=DOMAIN)[0]


def functions() -> list[onnx.FunctionProto]:
    """All functions of the domain, for a model's `functions`."""
    bodies: tuple[str, ...] = (_EXPONENTIAL, _THRESHOLD, _WEIGHTS, _DRAW, _FINITE, _FIRST_REJECTED)
    bodies += (_DRAW_TOKEN, _VERIFY_CHAIN, _VERIFY_CHAIN_SAMPLED, *tree_function.BODIES)
    return [parse(body) for body in bodies]


def _polynomial() -> str:
    """Horner's rule over EXP_COEFFICIENTS, then the squarings; `y` to `e`."""
    lines = [f"h{len(EXP_COEFFICIENTS)} = Constant <value_float = {EXP_COEFFICIENTS[-1]!r}> ()"]
    for i in range(len(EXP_COEFFICIENTS) - 1, -1, -1):
        coefficient = EXP_COEFFICIENTS[i - 1] if i else 1.0
        lines += [
            f"c{i} = Constant <value_float = {coefficient!r}> ()",
            f"m{i} = Mul (y, h{i + 1})",
            f"h{i} = Add (c{i}, m{i})",
        ]
    squares = ["h0", *(f"s{i}" for i in range(1, EXP_SQUARINGS)), "e"]
    lines += [f"{b} = Mul ({a}, {a})" for a, b in pairwise(squares)]
    return "\n    ".join(lines)


def _ranking(stage: int) -> str:
    """`threshold_{stage}` of every row: from the RANKED[stage] largest, or from more if need be."""
    if stage == len(RANKED):
        inputs = "integers, k_row, p_row, vocabulary"
        return f"threshold_{stage}, settled_{stage} = {DOMAIN}.Threshold ({inputs})"
    return f"""
            limit_{stage} = Constant <value_ints = [{RANKED[stage]}]> ()
            count_{stage} = Min (vocabulary, limit_{stage})
            ranked_{stage}, settled_{stage} =
                {DOMAIN}.Threshold (integers, k_row, p_row, count_{stage})
            settled_f_{stage} = Cast <to = 1> (settled_{stage})
            all_f_{stage} = ReduceMin <keepdims = 0> (settled_f_{stage})
            enough_{stage} = Greater (all_f_{stage}, zero_f)
            threshold_{stage} = If (enough_{stage}) <
                then_branch = take () => (taken_{stage}) {{ taken_{stage} = Identity (ranked_{stage}) }},
                else_branch = more () => (threshold_{stage + 1})
                {{
                    {_ranking(stage + 1)}
                }}
            >"""


# e = exponential(x), x ≤ 0.
_EXPONENTIAL = f"""
Exponential (x) => (e)
{{
    scale = Constant <value_float = {2.0**-EXP_SQUARINGS!r}> ()
    low = Constant <value_float = {EXP_FLOOR * 2.0**-EXP_SQUARINGS!r}> ()
    high = Constant <value_float = 0.0> ()
    scaled = Mul (x, scale)
    y = Clip (scaled, low, high)
    {_polynomial()}
}}
"""

# The smallest weight of every row that top-k and top-p keep, from the `count` heaviest tokens alone.
# weights i64 [B, R, V]; top_k, top_p [B, 1, 1]; count i64 [1] -> threshold i64 [B, R, 1];
# settled bool [B, R, 1]: count was enough.
_THRESHOLD = """
Threshold (weights, top_k, top_p, count) => (threshold, settled)
{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    last_axis = Constant <value_ints = [-1]> ()
    one_f = Constant <value_float = 1.0> ()
    ranked, order = TopK <axis = -1> (weights, count)

    rows = Shape <start = 0, end = 2> (weights)
    column = Concat <axis = 0> (rows, one)
    k_or_last = Min (top_k, count)
    k_or_first = Max (k_or_last, one)
    k_index = Sub (k_or_first, one)
    k_indices = Expand (k_index, column)
    kth = GatherElements <axis = -1> (ranked, k_indices)
    has_k = Greater (top_k, zero)
    by_rank = Where (has_k, kth, zero)

    k_keeps = GreaterOrEqual (weights, by_rank)
    k_weights = Where (k_keeps, weights, zero)
    total = ReduceSum (k_weights, last_axis)
    total_f = Cast <to = 1> (total)
    limit = Mul (top_p, total_f)
    k_keeps_ranked = GreaterOrEqual (ranked, by_rank)
    k_ranked = Where (k_keeps_ranked, ranked, zero)
    before = CumSum <exclusive = 1> (k_ranked, last_axis)
    before_f = Cast <to = 1> (before)
    fits = Less (before_f, limit)
    fits_f = Cast <to = 1> (fits)
    fitting_f = ReduceSum (fits_f, last_axis)
    fitting = Cast <to = 7> (fitting_f)
    fitting_or_one = Max (fitting, one)
    p_index = Sub (fitting_or_one, one)
    pth = GatherElements <axis = -1> (k_ranked, p_index)
    has_p = Less (top_p, one_f)
    by_mass = Where (has_p, pth, zero)
    threshold = Max (by_rank, by_mass)

    k_unsettled = Greater (top_k, count)
    p_open = GreaterOrEqual (fitting, count)
    p_unsettled = And (has_p, p_open)
    unsettled = Or (k_unsettled, p_unsettled)
    settled = Not (unsettled)
}
"""

# sampling.row_weights: logits f32 [B, R, V] -> weights i64 [B, R, V].
_WEIGHTS = f"""
Weights (logits, temperature, top_k, top_p) => (weights)
{{
    zero = Constant <value_int = 0> ()
    zero_f = Constant <value_float = 0.0> ()
    one_f = Constant <value_float = 1.0> ()
    last_axis = Constant <value_ints = [-1]> ()
    per_row = Constant <value_ints = [1, 2]> ()
    sampled = Greater (temperature, zero_f)
    heat = Where (sampled, temperature, one_f)
    heat_row = Unsqueeze (heat, per_row)
    highest = ReduceMax (logits, last_axis)
    below = Sub (logits, highest)
    x = Div (below, heat_row)
    e = {DOMAIN}.Exponential (x)
    weight_scale = Constant <value_float = {WEIGHT_SCALE!r}> ()
    scaled = Mul (e, weight_scale)
    integers = Cast <to = 7> (scaled)

    has_k = Greater (top_k, zero)
    has_p = Less (top_p, one_f)
    has_filter = Or (has_k, has_p)
    filters = And (has_filter, sampled)
    filters_f = Cast <to = 1> (filters)
    any_f = ReduceMax <keepdims = 0> (filters_f)
    filtered = Greater (any_f, zero_f)
    weights = If (filtered) <
        then_branch = filter () => (kept)
        {{
            k_used = Where (sampled, top_k, zero)
            p_used = Where (sampled, top_p, one_f)
            k_row = Unsqueeze (k_used, per_row)
            p_row = Unsqueeze (p_used, per_row)
            vocabulary = Shape <start = 2, end = 3> (logits)
            {_ranking(0)}
            keeps = GreaterOrEqual (integers, threshold_0)
            nothing = Constant <value_ints = [0]> ()
            kept = Where (keeps, integers, nothing)
        }},
        else_branch = keep () => (all) {{ all = Identity (integers) }}
    >
}}
"""

# sampling.draw: weights i64 [..., V], u f32 [...] -> token i64 [...].
_DRAW = """
Draw (weights, u) => (token)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    last = Constant <value_int = -1> ()
    last_axis = Constant <value_ints = [-1]> ()
    cumulative = CumSum (weights, last)
    total = Gather <axis = -1> (cumulative, last)
    total_f = Cast <to = 1> (total)
    scaled = Mul (u, total_f)
    truncated = Cast <to = 7> (scaled)
    total_less_one = Sub (total, one)
    target = Min (truncated, total_less_one)
    target_row = Unsqueeze (target, last_axis)
    passed = LessOrEqual (cumulative, target_row)
    passed_f = Cast <to = 1> (passed)
    count_f = ReduceSum <keepdims = 0> (passed_f, last_axis)
    count = Cast <to = 7> (count_f)
    vocabulary = Shape (weights)
    size = Gather (vocabulary, last)
    last_token = Sub (size, one)
    token = Min (count, last_token)
}
"""

# One sum a sequence: NaN and infinities survive a sum. logits f32 [B, R, V] -> finite bool [B].
_FINITE = """
Finite (logits) => (finite)
{
    row_axes = Constant <value_ints = [1, 2]> ()
    largest = Constant <value_float = 3.4028234e38> ()
    sum = ReduceSum <keepdims = 0> (logits, row_axes)
    magnitude = Abs (sum)
    finite = LessOrEqual (magnitude, largest)
}
"""

# Which drafts were accepted, from the tests that they passed.
# passed bool [B, G], draft_counts i64 [B], like i64 [B, R] -> first i64 [B, 1]: the first rejected, or
# the count; column i64 [1, R].
_FIRST_REJECTED = """
FirstRejected (passed, draft_counts, like) => (first, column)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    first_axis = Constant <value_ints = [0]> ()
    last_axis = Constant <value_ints = [1]> ()
    shape = Shape (like)
    batch = Shape <start = 0, end = 1> (like)
    rows = Gather (shape, one)
    columns = Range (zero, rows, one)
    column = Unsqueeze (columns, first_axis)
    counts = Unsqueeze (draft_counts, last_axis)
    end_shape = Concat <axis = 0> (batch, last_axis)
    end = ConstantOfShape <value = int32[1] {0}> (end_shape)
    passed_i = Cast <to = 6> (passed)
    passed_or_end = Concat <axis = 1> (passed_i, end)
    is_draft = Less (column, counts)
    is_draft_i = Cast <to = 6> (is_draft)
    both = Mul (passed_or_end, is_draft_i)
    first = ArgMin <axis = 1, keepdims = 1> (both)
}
"""

_DRAW_TOKEN = f"""
{DRAW_TOKEN} (logits, temperature, top_k, top_p, u) => (tokens)
{{
    zero_f = Constant <value_float = 0.0> ()
    row_axis = Constant <value_ints = [1]> ()
    best = ArgMax <axis = -1, keepdims = 0> (logits)
    hottest = ReduceMax <keepdims = 0> (temperature)
    any_sampled = Greater (hottest, zero_f)
    tokens = If (any_sampled) <
        then_branch = sample () => (chosen)
        {{
            row = Unsqueeze (logits, row_axis)
            weights = {DOMAIN}.Weights (row, temperature, top_k, top_p)
            u_row = Unsqueeze (u, row_axis)
            drawn_row = {DOMAIN}.Draw (weights, u_row)
            drawn = Squeeze (drawn_row, row_axis)
            sampled = Greater (temperature, zero_f)
            chosen = Where (sampled, drawn, best)
        }},
        else_branch = greedy () => (argmax) {{ argmax = Identity (best) }}
    >
}}
"""

_VERIFY_CHAIN = f"""
{VERIFY_CHAIN} (target_logits, draft_tokens, draft_counts, temperature, top_k, top_p, uniforms)
    => (accepted, tokens, finite)
{{
    zero_f = Constant <value_float = 0.0> ()
    row_axis = Constant <value_ints = [1]> ()
    best = ArgMax <axis = -1, keepdims = 0> (target_logits)
    hottest = ReduceMax <keepdims = 0> (temperature)
    any_sampled = Greater (hottest, zero_f)
    choice = If (any_sampled) <
        then_branch = sample () => (chosen)
        {{
            weights = {DOMAIN}.Weights (target_logits, temperature, top_k, top_p)
            sample = Constant <value_int = {SAMPLE}> ()
            u = Gather <axis = -1> (uniforms, sample)
            drawn = {DOMAIN}.Draw (weights, u)
            sampled = Greater (temperature, zero_f)
            sampled_row = Unsqueeze (sampled, row_axis)
            chosen = Where (sampled_row, drawn, best)
        }},
        else_branch = greedy () => (argmax) {{ argmax = Identity (best) }}
    >

    first_row = Constant <value_ints = [0]> ()
    minus_one = Constant <value_ints = [-1]> ()
    draft_rows = Slice (choice, first_row, minus_one, row_axis)
    passed = Equal (draft_tokens, draft_rows)
    first, column = {DOMAIN}.FirstRejected (passed, draft_counts, best)

    finite = {DOMAIN}.Finite (target_logits)
    finite_row = Unsqueeze (finite, row_axis)
    nothing = Constant <value_ints = [0]> ()
    accepted_row = Where (finite_row, first, nothing)
    accepted = Squeeze (accepted_row, row_axis)
    reached = LessOrEqual (column, accepted_row)
    emits = And (reached, finite_row)
    tokens = Where (emits, choice, minus_one)
}}
"""

_VERIFY_CHAIN_SAMPLED = f"""
{VERIFY_CHAIN_SAMPLED}
    (target_logits, draft_tokens, draft_counts, draft_logits, temperature, top_k, top_p, uniforms)
    => (accepted, tokens, finite)
{{
    zero = Constant <value_int = 0> ()
    zero_f = Constant <value_float = 0.0> ()
    row_axis = Constant <value_ints = [1]> ()
    last_axis = Constant <value_ints = [-1]> ()
    first_row = Constant <value_ints = [0]> ()
    minus_one = Constant <value_ints = [-1]> ()
    counts = Unsqueeze (draft_counts, row_axis)
    best = ArgMax <axis = -1, keepdims = 0> (target_logits)
    best_of_drafts = Slice (best, first_row, minus_one, row_axis)
    equal = Equal (draft_tokens, best_of_drafts)
    target_finite = {DOMAIN}.Finite (target_logits)
    hottest = ReduceMax <keepdims = 0> (temperature)
    any_sampled = Greater (hottest, zero_f)
    first, column, last, finite = If (any_sampled) <
        then_branch = sample () => (s_first, s_column, s_last, s_finite)
        {{
            sampled = Greater (temperature, zero_f)
            sampled_row = Unsqueeze (sampled, row_axis)
            p = {DOMAIN}.Weights (target_logits, temperature, top_k, top_p)
            q = {DOMAIN}.Weights (draft_logits, temperature, top_k, top_p)
            p_total = ReduceSum (p, last_axis)
            q_total = ReduceSum (q, last_axis)
            p_total_f = Cast <to = 1> (p_total)
            q_total_f = Cast <to = 1> (q_total)

            vocabulary = Shape <start = 2, end = 3> (target_logits)
            one = Constant <value_int = 1> ()
            last_token = Sub (vocabulary, one)
            at_most = Min (draft_tokens, last_token)
            token = Max (at_most, zero)
            index = Unsqueeze (token, last_axis)
            p_drafts = Slice (p, first_row, minus_one, row_axis)
            p_drafts_total = Slice (p_total_f, first_row, minus_one, row_axis)
            p_chosen = GatherElements <axis = -1> (p_drafts, index)
            q_chosen = GatherElements <axis = -1> (q, index)
            p_chosen_f = Cast <to = 1> (p_chosen)
            q_chosen_f = Cast <to = 1> (q_chosen)
            p_of_draft = Div (p_chosen_f, p_drafts_total)
            q_of_draft = Div (q_chosen_f, q_total_f)
            accept = Constant <value_ints = [{ACCEPT}]> ()
            u_rows = Gather <axis = -1> (uniforms, accept)
            u_drafts = Slice (u_rows, first_row, minus_one, row_axis)
            ceiling = Mul (u_drafts, q_of_draft)
            likely_column = Less (ceiling, p_of_draft)
            likely = Squeeze (likely_column, last_axis)
            likely_sampled = And (likely, sampled_row)
            not_sampled = Not (sampled_row)
            equal_greedy = And (equal, not_sampled)
            passed = Or (likely_sampled, equal_greedy)
            s_first, s_column = {DOMAIN}.FirstRejected (passed, draft_counts, best)

            p_row = GatherND <batch_dims = 1> (p, s_first)
            stopped = Less (s_first, counts)
            rejected = And (stopped, sampled_row)
            rejected_f = Cast <to = 1> (rejected)
            any_f = ReduceMax <keepdims = 0> (rejected_f)
            any_rejected = Greater (any_f, zero_f)
            weights = If (any_rejected) <
                then_branch = correct () => (corrected)
                {{
                    width = Shape <start = 1, end = 2> (draft_tokens)
                    last_draft = Sub (width, one)
                    q_at = Min (s_first, last_draft)
                    q_row = GatherND <batch_dims = 1> (q, q_at)
                    p_sum = GatherND <batch_dims = 1> (p_total_f, s_first)
                    q_sum = GatherND <batch_dims = 1> (q_total_f, q_at)
                    p_row_f = Cast <to = 1> (p_row)
                    q_row_f = Cast <to = 1> (q_row)
                    p_share = Div (p_row_f, p_sum)
                    q_share = Div (q_row_f, q_sum)
                    difference = Sub (p_share, q_share)
                    excess = Max (difference, zero_f)
                    scale = Constant <value_float = {RESIDUAL_SCALE!r}> ()
                    scaled = Mul (excess, scale)
                    residual = Cast <to = 7> (scaled)
                    largest = ReduceMax (residual, last_axis)
                    nonzero = Greater (largest, zero)
                    use = And (nonzero, rejected)
                    corrected = Where (use, residual, p_row)
                }},
                else_branch = bonus () => (unchanged) {{ unchanged = Identity (p_row) }}
            >
            sample = Constant <value_int = {SAMPLE}> ()
            u_sample = Gather <axis = -1> (uniforms, sample)
            u = GatherElements <axis = 1> (u_sample, s_first)
            u_flat = Squeeze (u, row_axis)
            drawn = {DOMAIN}.Draw (weights, u_flat)
            drawn_column = Unsqueeze (drawn, row_axis)
            s_best = GatherElements <axis = 1> (best, s_first)
            s_last = Where (sampled_row, drawn_column, s_best)

            draft_finite = {DOMAIN}.Finite (draft_logits)
            unread = Not (sampled)
            draft_passable = Or (draft_finite, unread)
            s_finite = And (target_finite, draft_passable)
        }},
        else_branch = greedy () => (g_first, g_column, g_last, g_finite)
        {{
            g_first, g_column = {DOMAIN}.FirstRejected (equal, draft_counts, best)
            g_last = GatherElements <axis = 1> (best, g_first)
            g_finite = Identity (target_finite)
        }}
    >

    finite_row = Unsqueeze (finite, row_axis)
    nothing = Constant <value_ints = [0]> ()
    accepted_row = Where (finite_row, first, nothing)
    accepted = Squeeze (accepted_row, row_axis)
    batch = Shape <start = 0, end = 1> (draft_tokens)
    end_shape = Concat <axis = 0> (batch, row_axis)
    end = ConstantOfShape <value = int64[1] {{-1}}> (end_shape)
    drafts = Concat <axis = 1> (draft_tokens, end)
    is_accepted = Less (column, accepted_row)
    is_last = Equal (column, accepted_row)
    emits_last = And (is_last, finite_row)
    last_or_none = Where (emits_last, last, minus_one)
    tokens = Where (is_accepted, drafts, last_or_none)
}}
"""
