"""Verification on trees as ONNX functions: the definition of `tree_reference`, token for token.

    TreeEncoding(parents) -> ancestors, depths
    VerifyTree(target_logits, draft_tokens, parents, draft_counts,
               temperature, top_k, top_p, uniforms) -> accepted, tokens, path, finite, choice
    VerifyTypical(… the same …, posterior_threshold, posterior_alpha) -> the same

What is said in `function` of operators and of top-k and top-p holds here, too.
"""

from __future__ import annotations

from itertools import pairwise

from engines.sampling import EXP_FLOOR, WEIGHT_SCALE
from engines.trees import MAX_DEPTH
from engines.uniforms import SAMPLE
from engines.verification.domain import DOMAIN, Graph
from engines.verification.tree_reference import FIXED_POINT

__all__ = [
    "BODIES",
    "TREE_ENCODING",
    "VERIFY_TREE",
    "VERIFY_TYPICAL",
    "tree_encoding",
    "verify_tree",
    "verify_typical",
]

TREE_ENCODING = "TreeEncoding"
VERIFY_TREE = "VerifyTree"
VERIFY_TYPICAL = "VerifyTypical"

_CLOSURE_SQUARINGS = (MAX_DEPTH - 1).bit_length()  # k of them reach 2^k levels up


def tree_encoding(graph: Graph, parents: str) -> tuple[str, str]:
    """Emit the call that encodes trees; returns ancestors bool [B, R, R] and depths i64 [B, R]."""
    ancestors, depths = graph.multi(TREE_ENCODING, parents, outputs=2, domain=DOMAIN)
    return ancestors, depths


def verify_tree(
    graph: Graph,
    target_logits: str,
    draft_tokens: str,
    parents: str,
    draft_counts: str,
    temperature: str,
    top_k: str,
    top_p: str,
    uniforms: str,
) -> tuple[str, str, str, str, str]:
    """Emit the call that verifies a tree of point-mass drafts.

    Returns:
        The names of accepted i64 [B], tokens i64 [B, P], path i64 [B, P - 1], finite bool [B], choice
        i64 [B, R].
    """
    operands = (target_logits, draft_tokens, parents, draft_counts, temperature, top_k, top_p, uniforms)
    accepted, tokens, path, finite, choice = graph.multi(VERIFY_TREE, *operands, outputs=5, domain=DOMAIN)
    return accepted, tokens, path, finite, choice


def verify_typical(
    graph: Graph,
    target_logits: str,
    draft_tokens: str,
    parents: str,
    draft_counts: str,
    temperature: str,
    top_k: str,
    top_p: str,
    uniforms: str,
    *,
    posterior_threshold: float,
    posterior_alpha: float,
) -> tuple[str, str, str, str, str]:
    """Emit the call that verifies a tree by typical acceptance; returns as `verify_tree` does."""
    operands = [target_logits, draft_tokens, parents, draft_counts, temperature, top_k, top_p, uniforms]
    for value in (posterior_threshold, posterior_alpha):
        operands += graph.multi("Constant", outputs=1, value_float=value)
    accepted, tokens, path, finite, choice = graph.multi(VERIFY_TYPICAL, *operands, outputs=5, domain=DOMAIN)
    return accepted, tokens, path, finite, choice


def _closure() -> str:
    """Who sees whom: the matrix of parents and selves, squared until it reaches every ancestor."""
    names = ["edges", *(f"reach_{i}" for i in range(1, _CLOSURE_SQUARINGS)), "reach"]
    lines = [f"{b}_sum = MatMul ({a}, {a})\n    {b} = Min ({b}_sum, one_f)" for a, b in pairwise(names)]
    return "\n    ".join(lines)


# parents i64 [B, N] -> ancestors bool [B, R, R], depths i64 [B, R].
_TREE_ENCODING = f"""
{TREE_ENCODING} (parents) => (ancestors, depths)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    one_f = Constant <value_float = 1.0> ()
    half = Constant <value_float = 0.5> ()
    row_axis = Constant <value_ints = [1]> ()
    last_axis = Constant <value_ints = [2]> ()
    batch = Shape <start = 0, end = 1> (parents)
    root_shape = Concat <axis = 0> (batch, row_axis)
    root = ConstantOfShape <value = int64[1] {{0}}> (root_shape)
    above = Concat <axis = 1> (root, parents)
    shape = Shape (above)
    rows = Gather (shape, one)
    numbers = Range (zero, rows, one)
    above_column = Unsqueeze (above, last_axis)
    is_parent = Equal (above_column, numbers)
    number_column = Unsqueeze (numbers, row_axis)
    is_self = Equal (number_column, numbers)
    parent_f = Cast <to = 1> (is_parent)
    self_f = Cast <to = 1> (is_self)
    edges = Max (parent_f, self_f)
    {_closure()}
    ancestors = Greater (reach, half)
    seen_f = ReduceSum <keepdims = 0> (reach, last_axis)
    seen = Cast <to = 7> (seen_f)
    depths = Sub (seen, one)
}}
"""

# The target's own token behind every node. weights i64 [B, R, V], best, depths i64 [B, R] -> choice [B, R].
_TREE_CHOICE = f"""
TreeChoice (weights, best, depths, temperature, uniforms) => (choice)
{{
    zero_f = Constant <value_float = 0.0> ()
    one = Constant <value_ints = [1]> ()
    sample = Constant <value_int = {SAMPLE}> ()
    u = Gather <axis = -1> (uniforms, sample)
    levels = Shape <start = 1, end = 2> (uniforms)
    last_level = Sub (levels, one)
    level = Min (depths, last_level)
    u_row = GatherElements <axis = 1> (u, level)
    drawn = {DOMAIN}.Draw (weights, u_row)
    sampled = Greater (temperature, zero_f)
    sampled_row = Unsqueeze (sampled, one)
    choice = Where (sampled_row, drawn, best)
}}
"""

# The deepest node whose whole path passed. passed bool [B, N] -> the verdict.
_TREE_VERDICT = f"""
TreeVerdict (target_logits, draft_tokens, own, passed, ancestors, depths, draft_counts, uniforms)
    => (accepted, tokens, path, finite, choice)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    half = Constant <value_float = 0.5> ()
    nothing = Constant <value_ints = [0]> ()
    row_axis = Constant <value_ints = [1]> ()
    last_axis = Constant <value_ints = [2]> ()
    minus_one = Constant <value_ints = [-1]> ()
    end = Constant <value_ints = [4611686018427387904]> ()

    finite = {DOMAIN}.Finite (target_logits)
    finite_row = Unsqueeze (finite, row_axis)
    levels = Shape <start = 1, end = 2> (uniforms)
    levels_scalar = Squeeze (levels)
    level = Range (zero, levels_scalar, one)
    draft_depths = Slice (depths, row_axis, end, row_axis)
    shallow = Less (draft_depths, levels)
    nodes_shape = Shape (draft_tokens)
    count = Gather (nodes_shape, one)
    index = Range (zero, count, one)
    counts = Unsqueeze (draft_counts, row_axis)
    real = Less (index, counts)
    in_reach = And (shallow, real)
    passed_finite = And (passed, finite_row)
    usable = And (in_reach, passed_finite)
    failed = Not (usable)
    failed_f = Cast <to = 1> (failed)
    batch = Shape <start = 0, end = 1> (draft_tokens)
    root_shape = Concat <axis = 0> (batch, row_axis)
    root_f = ConstantOfShape <value = float[1] {{0}}> (root_shape)
    fails = Concat <axis = 1> (root_f, failed_f)
    fails_column = Unsqueeze (fails, last_axis)
    ancestors_f = Cast <to = 1> (ancestors)
    path_fails_column = MatMul (ancestors_f, fails_column)
    path_fails = Squeeze (path_fails_column, last_axis)
    whole = Less (path_fails, half)
    reached = Where (whole, depths, zero)
    node = ArgMax <axis = 1, keepdims = 1> (reached)
    accepted = ReduceMax <keepdims = 0> (reached, row_axis)

    on_path = GatherND <batch_dims = 1> (ancestors, node)
    on_path_row = Unsqueeze (on_path, row_axis)
    depth_row = Unsqueeze (depths, row_axis)
    level_column = Unsqueeze (level, row_axis)
    at_level = Equal (depth_row, level_column)
    at = And (on_path_row, at_level)
    at_i = Cast <to = 6> (at)
    nodes = ArgMax <axis = 2, keepdims = 0> (at_i)
    path = Slice (nodes, row_axis, end, row_axis)

    root_i = ConstantOfShape <value = int64[1] {{0}}> (root_shape)
    node_tokens = Concat <axis = 1> (root_i, draft_tokens)
    on_path_tokens = GatherElements <axis = 1> (node_tokens, path)
    drafts = Concat <axis = 1> (on_path_tokens, root_i)
    choice = Where (finite_row, own, minus_one)
    last = GatherElements <axis = 1> (choice, node)
    accepted_column = Unsqueeze (accepted, row_axis)
    is_accepted = Less (level, accepted_column)
    is_last = Equal (level, accepted_column)
    emits_last = And (is_last, finite_row)
    last_or_none = Where (emits_last, last, minus_one)
    tokens = Where (is_accepted, drafts, last_or_none)
}}
"""

_VERIFY_TREE = f"""
{VERIFY_TREE} (target_logits, draft_tokens, parents, draft_counts, temperature, top_k, top_p, uniforms)
    => (accepted, tokens, path, finite, choice)
{{
    zero_f = Constant <value_float = 0.0> ()
    ancestors, depths = {DOMAIN}.{TREE_ENCODING} (parents)
    best = ArgMax <axis = -1, keepdims = 0> (target_logits)
    hottest = ReduceMax <keepdims = 0> (temperature)
    any_sampled = Greater (hottest, zero_f)
    own = If (any_sampled) <
        then_branch = sample () => (chosen)
        {{
            weights = {DOMAIN}.Weights (target_logits, temperature, top_k, top_p)
            chosen = {DOMAIN}.TreeChoice (weights, best, depths, temperature, uniforms)
        }},
        else_branch = greedy () => (argmax) {{ argmax = Identity (best) }}
    >
    wanted = GatherElements <axis = 1> (own, parents)
    passed = Equal (draft_tokens, wanted)
    accepted, tokens, path, finite, choice = {DOMAIN}.TreeVerdict
        (target_logits, draft_tokens, own, passed, ancestors, depths, draft_counts, uniforms)
}}
"""

_VERIFY_TYPICAL = f"""
{VERIFY_TYPICAL}
    (target_logits, draft_tokens, parents, draft_counts, temperature, top_k, top_p, uniforms,
     posterior_threshold, posterior_alpha)
    => (accepted, tokens, path, finite, choice)
{{
    zero_f = Constant <value_float = 0.0> ()
    ancestors, depths = {DOMAIN}.{TREE_ENCODING} (parents)
    best = ArgMax <axis = -1, keepdims = 0> (target_logits)
    hottest = ReduceMax <keepdims = 0> (temperature)
    any_sampled = Greater (hottest, zero_f)
    own, passed = If (any_sampled) <
        then_branch = sample () => (s_choice, s_passed)
        {{
            one_f = Constant <value_float = 1.0> ()
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            row_axis = Constant <value_ints = [1]> ()
            last_axis = Constant <value_ints = [-1]> ()
            per_row = Constant <value_ints = [1, 2]> ()
            weights = {DOMAIN}.Weights (target_logits, temperature, top_k, top_p)
            s_choice = {DOMAIN}.TreeChoice (weights, best, depths, temperature, uniforms)

            sampled = Greater (temperature, zero_f)
            heat = Where (sampled, temperature, one_f)
            heat_row = Unsqueeze (heat, per_row)
            highest = ReduceMax (target_logits, last_axis)
            difference = Sub (target_logits, highest)
            below = Div (difference, heat_row)
            floor = Constant <value_float = {EXP_FLOOR!r}> ()
            clipped = Clip (below, floor, zero_f)
            fixed = Constant <value_float = {FIXED_POINT!r}> ()
            fixed_logs = Mul (clipped, fixed)
            logs = Cast <to = 7> (fixed_logs)
            products = Mul (weights, logs)
            sum = ReduceSum <keepdims = 0> (products, last_axis)
            sum_f = Cast <to = 1> (sum)
            total = ReduceSum <keepdims = 0> (weights, last_axis)
            total_f = Cast <to = 1> (total)
            scaled_total = Mul (total_f, fixed)
            mean = Div (sum_f, scaled_total)
            power = {DOMAIN}.Exponential (mean)
            unit = Constant <value_float = {WEIGHT_SCALE!r}> ()
            normaliser = Div (total_f, unit)
            typical = Div (power, normaliser)
            scaled_typical = Mul (posterior_alpha, typical)
            cut = Min (posterior_threshold, scaled_typical)

            shape = Shape (target_logits)
            two = Constant <value_int = 2> ()
            vocabulary = Gather (shape, two)
            last_token = Sub (vocabulary, one)
            at_most = Min (draft_tokens, last_token)
            token = Max (at_most, zero)
            row_start = Mul (parents, vocabulary)
            place = Add (row_start, token)
            flat_shape = Constant <value_ints = [0, -1]> ()
            flat = Reshape (weights, flat_shape)
            chosen = GatherElements <axis = 1> (flat, place)
            chosen_f = Cast <to = 1> (chosen)
            parent_total = GatherElements <axis = 1> (total_f, parents)
            p = Div (chosen_f, parent_total)
            parent_cut = GatherElements <axis = 1> (cut, parents)
            likely = Greater (p, parent_cut)
            wanted = GatherElements <axis = 1> (s_choice, parents)
            equal = Equal (draft_tokens, wanted)
            sampled_row = Unsqueeze (sampled, row_axis)
            not_sampled = Not (sampled_row)
            by_probability = And (sampled_row, likely)
            by_match = And (not_sampled, equal)
            s_passed = Or (by_probability, by_match)
        }},
        else_branch = greedy () => (g_choice, g_passed)
        {{
            g_choice = Identity (best)
            g_wanted = GatherElements <axis = 1> (best, parents)
            g_passed = Equal (draft_tokens, g_wanted)
        }}
    >
    accepted, tokens, path, finite, choice = {DOMAIN}.TreeVerdict
        (target_logits, draft_tokens, own, passed, ancestors, depths, draft_counts, uniforms)
}}
"""

# Each behind those that it calls.
BODIES = (_TREE_ENCODING, _TREE_CHOICE, _TREE_VERDICT, _VERIFY_TREE, _VERIFY_TYPICAL)
