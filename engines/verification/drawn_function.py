"""Verification of drawn siblings as ONNX functions: the definition of `drawn_reference`, token for token.

    DrawSiblings{W}(logits, temperature, top_k, top_p, u) -> tokens
    VerifyTreeDrawn{D}x{W}(target_logits, draft_tokens, parents, draft_counts, draft_logits,
                           temperature, top_k, top_p, uniforms) -> accepted, tokens, path, finite

Depth D = P - 1 and width W are unrolled; every level reads the rows of its own nodes only. What is said
in `function` of operators and of top-k and top-p holds here, too.
"""

from __future__ import annotations

import onnx

from engines.uniforms import ACCEPT, DRAWS, SAMPLE
from engines.verification.domain import DOMAIN, Graph, parse
from engines.verification.drawn_reference import NO_TOKEN
from engines.verification.reference import RESIDUAL_SCALE

__all__ = ["draw_siblings", "drawn_functions", "verify_tree_drawn"]


def draw_siblings(
    graph: Graph, logits: str, temperature: str, top_k: str, top_p: str, u: str, *, width: int
) -> str:
    """Emit the call that draws `width` different tokens a sequence; returns the name of i64 [B, W]."""
    operands = (logits, temperature, top_k, top_p, u)
    return graph.multi(_draw_name(width), *operands, outputs=1, domain=DOMAIN)[0]


def verify_tree_drawn(
    graph: Graph,
    target_logits: str,
    draft_tokens: str,
    parents: str,
    draft_counts: str,
    draft_logits: str,
    temperature: str,
    top_k: str,
    top_p: str,
    uniforms: str,
    *,
    depth: int,
    width: int,
) -> tuple[str, str, str, str]:
    """Emit the call that verifies a tree of drawn siblings; uniforms: f32 [B, depth + 1, 3 · width].

    Returns:
        The names of accepted i64 [B], tokens i64 [B, depth + 1], path i64 [B, depth], finite bool [B].
    """
    operands = (target_logits, draft_tokens, parents, draft_counts, draft_logits)
    sampling = (temperature, top_k, top_p, uniforms)
    name = _verify_name(depth, width)
    accepted, tokens, path, finite = graph.multi(name, *operands, *sampling, outputs=4, domain=DOMAIN)
    return accepted, tokens, path, finite


def drawn_functions(depth: int, width: int) -> list[onnx.FunctionProto]:
    """The functions for trees of this depth and this many siblings, beside `function.functions()`."""
    bodies = (_SIBLING, _draw(width), _level(width), _greedy_level(width), _verify(depth, width))
    return [parse(body) for body in bodies]


def _draw_name(width: int) -> str:
    return f"DrawSiblings{width}"


def _verify_name(depth: int, width: int) -> str:
    return f"VerifyTreeDrawn{depth}x{width}"


# One try. p, q i64 [B, V]; token i64, open, matches, sampled bool, u f32 [B, 1] -> what is left of p and
# q, and accepted bool [B, 1].
_SIBLING = f"""
DrawnSibling (p, q, token, open, matches, sampled, u) => (p_left, q_left, accepted)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_f = Constant <value_float = 0.0> ()
    last_axis = Constant <value_ints = [-1]> ()
    shape = Shape (p)
    vocabulary = Gather (shape, one)
    last_token = Sub (vocabulary, one)
    at_most = Min (token, last_token)
    index = Max (at_most, zero)
    inside = Equal (index, token)
    p_total = ReduceSum (p, last_axis)
    q_total = ReduceSum (q, last_axis)
    has_q = Greater (q_total, zero)
    greedy = Not (sampled)
    readable = Or (has_q, greedy)
    open_inside = And (open, inside)
    tried = And (open_inside, readable)

    p_total_f = Cast <to = 1> (p_total)
    q_total_f = Cast <to = 1> (q_total)
    p_chosen = GatherElements <axis = 1> (p, index)
    q_chosen = GatherElements <axis = 1> (q, index)
    p_chosen_f = Cast <to = 1> (p_chosen)
    q_chosen_f = Cast <to = 1> (q_chosen)
    p_of_token = Div (p_chosen_f, p_total_f)
    q_of_token = Div (q_chosen_f, q_total_f)
    ceiling = Mul (u, q_of_token)
    likely = Less (ceiling, p_of_token)
    likely_sampled = And (likely, sampled)
    matches_greedy = And (matches, greedy)
    passed = Or (likely_sampled, matches_greedy)
    accepted = And (tried, passed)
    failed = Not (passed)
    tried_sampled = And (tried, sampled)
    rejected = And (tried_sampled, failed)

    p_f = Cast <to = 1> (p)
    q_f = Cast <to = 1> (q)
    p_share = Div (p_f, p_total_f)
    q_share = Div (q_f, q_total_f)
    difference = Sub (p_share, q_share)
    excess = Max (difference, zero_f)
    scale = Constant <value_float = {RESIDUAL_SCALE!r}> ()
    scaled = Mul (excess, scale)
    residual = Cast <to = 7> (scaled)
    largest = ReduceMax (residual, last_axis)
    nonzero = Greater (largest, zero)
    use = And (nonzero, rejected)
    p_left = Where (use, residual, p)
    numbers = Range (zero, vocabulary, one)
    is_token = Equal (numbers, index)
    drops = And (is_token, rejected)
    q_left = Where (drops, zero, q)
}}
"""

# The children of a node. above i64 [B, R], node, counts i64 [B, 1] -> children bool, place i64 [B, R].
_CHILDREN = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    row_axis = Constant <value_ints = [1]> ()
    shape = Shape (above)
    rows = Gather (shape, one)
    numbers = Range (zero, rows, one)
    real = LessOrEqual (numbers, counts)
    below = Equal (above, node)
    children = And (below, real)
    children_i = Cast <to = 7> (children)
    place = CumSum (children_i, one)
"""


def _level(width: int) -> str:
    """Try a node's children. All of [B, 1], but `left` and `left_before` i64 [B, V], u f32 [B, 3 W]."""
    tries = "".join(
        f"""
    place_{w} = Constant <value_int = {w + 1}> ()
    has_place_{w} = Equal (place, place_{w})
    is_child_{w} = And (children, has_place_{w})
    is_child_i_{w} = Cast <to = 6> (is_child_{w})
    child_{w} = ArgMax <axis = 1, keepdims = 1> (is_child_i_{w})
    exists_{w} = Greater (child_{w}, zero)
    open_{w} = And (exists_{w}, going_{w})
    token_{w} = GatherElements <axis = 1> (held, child_{w})
    matches_{w} = Equal (token_{w}, wanted)
    accept_{w} = Constant <value_ints = [{DRAWS * w + ACCEPT}]> ()
    u_{w} = Gather <axis = 1> (u, accept_{w})
    p_{w + 1}, q_{w + 1}, accepted_{w} =
        {DOMAIN}.DrawnSibling (p_{w}, q_{w}, token_{w}, open_{w}, matches_{w}, sampled, u_{w})
    node_{w + 1} = Where (accepted_{w}, child_{w}, node_{w})
    rejected_{w} = Not (accepted_{w})
    going_{w + 1} = And (going_{w}, rejected_{w})"""
        for w in range(width)
    )
    return f"""
DrawnLevel{width} (target_logits, draft_logits, best, above, held, counts, temperature, top_k, top_p, u,
    node, going, left_before) => (following, goes_on, left)
{{
    {_CHILDREN}
    zero_f = Constant <value_float = 0.0> ()
    heat_column = Unsqueeze (temperature, row_axis)
    sampled = Greater (heat_column, zero_f)
    wanted = GatherElements <axis = 1> (best, node)
    target_row = GatherND <batch_dims = 1> (target_logits, node)
    draft_row = GatherND <batch_dims = 1> (draft_logits, node)
    target_rows = Unsqueeze (target_row, row_axis)
    draft_rows = Unsqueeze (draft_row, row_axis)
    p_rows = {DOMAIN}.Weights (target_rows, temperature, top_k, top_p)
    q_rows = {DOMAIN}.Weights (draft_rows, temperature, top_k, top_p)
    p_0 = Squeeze (p_rows, row_axis)
    q_0 = Squeeze (q_rows, row_axis)
    node_0 = Identity (node)
    going_0 = Identity (going)
    {tries}
    following = Identity (node_{width})
    ends = Identity (going_{width})
    left = Where (ends, p_{width}, left_before)
    stays = Not (ends)
    goes_on = And (going, stays)
}}
"""


def _greedy_level(width: int) -> str:
    """The first of a node's children that is the target's best token."""
    return f"""
DrawnGreedyLevel{width} (best, above, held, counts, node) => (following, goes_on)
{{
    {_CHILDREN}
    width = Constant <value_int = {width}> ()
    wanted = GatherElements <axis = 1> (best, node)
    equal = Equal (held, wanted)
    tried = LessOrEqual (place, width)
    child_equal = And (children, equal)
    passed = And (child_equal, tried)
    passed_i = Cast <to = 6> (passed)
    child = ArgMax <axis = 1, keepdims = 1> (passed_i)
    goes_on = Greater (child, zero)
    following = Where (goes_on, child, node)
}}
"""


def _draw(width: int) -> str:
    draws = "".join(
        f"""
            place_{w} = Constant <value_int = {w}> ()
            u_{w} = Gather <axis = 1> (u, place_{w})
            drawn_{w} = {DOMAIN}.Draw (weights_{w}, u_{w})
            total_{w} = ReduceSum <keepdims = 0> (weights_{w}, row_axis)
            any_left_{w} = Greater (total_{w}, zero)
            token_{w} = Where (any_left_{w}, drawn_{w}, none)
            column_{w} = Unsqueeze (token_{w}, row_axis)
            is_token_{w} = Equal (numbers, column_{w})
            weights_{w + 1} = Where (is_token_{w}, zero, weights_{w})"""
        for w in range(width)
    )
    columns = ", ".join(f"column_{w}" for w in range(width))
    return f"""
{_draw_name(width)} (logits, temperature, top_k, top_p, u) => (tokens)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_f = Constant <value_float = 0.0> ()
    none = Constant <value_int = {NO_TOKEN}> ()
    row_axis = Constant <value_ints = [1]> ()
    shape = Shape (logits)
    vocabulary = Gather (shape, one)
    heat_column = Unsqueeze (temperature, row_axis)
    sampled = Greater (heat_column, zero_f)
    blank_shape = Shape (u)
    blank = ConstantOfShape <value = int64[1] {{{NO_TOKEN}}}> (blank_shape)

    coldest = ReduceMin <keepdims = 0> (temperature)
    any_greedy = LessOrEqual (coldest, zero_f)
    best = If (any_greedy) <
        then_branch = rank () => (ranked)
        {{
            width = Constant <value_ints = [{width}]> ()
            size = Shape <start = 1, end = 2> (logits)
            count = Min (size, width)
            values, order = TopK <axis = 1> (logits, count)
            padded = Concat <axis = 1> (order, blank)
            start = Constant <value_ints = [0]> ()
            ranked = Slice (padded, start, width, row_axis)
        }},
        else_branch = skip_rank () => (unranked) {{ unranked = Identity (blank) }}
    >
    hottest = ReduceMax <keepdims = 0> (temperature)
    any_sampled = Greater (hottest, zero_f)
    tokens = If (any_sampled) <
        then_branch = sample () => (chosen)
        {{
            numbers = Range (zero, vocabulary, one)
            rows = Unsqueeze (logits, row_axis)
            row_weights = {DOMAIN}.Weights (rows, temperature, top_k, top_p)
            weights_0 = Squeeze (row_weights, row_axis)
            {draws}
            drawn = Concat <axis = 1> ({columns})
            chosen = Where (sampled, drawn, best)
        }},
        else_branch = greedy () => (highest) {{ highest = Identity (best) }}
    >
}}
"""


def _verify(depth: int, width: int) -> str:
    operands = "best, above, held, counts"
    sampling = "temperature, top_k, top_p"
    sampled_levels = "".join(
        f"""
            s_place_{d} = Constant <value_int = {d}> ()
            s_u_{d} = Gather <axis = 1> (uniforms, s_place_{d})
            s_node_{d + 1}, s_going_{d + 1}, s_left_{d + 1} = {DOMAIN}.DrawnLevel{width} (target_logits,
                draft_logits, {operands}, {sampling}, s_u_{d}, s_node_{d}, s_going_{d}, s_left_{d})
            s_step_{d} = Where (s_going_{d + 1}, s_node_{d + 1}, zero)"""
        for d in range(depth)
    )
    greedy_levels = "".join(
        f"""
            g_node_{d + 1}, g_found_{d} = {DOMAIN}.DrawnGreedyLevel{width} ({operands}, g_node_{d})
            g_going_{d + 1} = And (g_going_{d}, g_found_{d})
            g_step_{d} = Where (g_going_{d + 1}, g_node_{d + 1}, zero)"""
        for d in range(depth)
    )
    s_steps = ", ".join(["nowhere", *(f"s_step_{d}" for d in range(depth))])
    g_steps = s_steps.replace("s_step", "g_step")
    return f"""
{_verify_name(depth, width)} (target_logits, draft_tokens, parents, draft_counts, draft_logits, {sampling},
    uniforms) => (accepted, tokens, path, finite)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_f = Constant <value_float = 0.0> ()
    row_axis = Constant <value_ints = [1]> ()
    minus_one = Constant <value_ints = [-1]> ()
    end = Constant <value_ints = [4611686018427387904]> ()
    batch = Shape <start = 0, end = 1> (draft_tokens)
    column_shape = Concat <axis = 0> (batch, row_axis)
    no_parent = ConstantOfShape <value = int64[1] {{-1}}> (column_shape)
    no_token = ConstantOfShape <value = int64[1] {{{NO_TOKEN}}}> (column_shape)
    nowhere = ConstantOfShape <value = int64[1] {{0}}> (column_shape)
    above = Concat <axis = 1> (no_parent, parents)
    held = Concat <axis = 1> (no_token, draft_tokens)
    counts = Unsqueeze (draft_counts, row_axis)
    best = ArgMax <axis = -1, keepdims = 0> (target_logits)
    target_finite = {DOMAIN}.Finite (target_logits)
    hottest = ReduceMax <keepdims = 0> (temperature)
    any_sampled = Greater (hottest, zero_f)
    steps, last, finite = If (any_sampled) <
        then_branch = sample () => (s_steps, s_last, s_finite)
        {{
            sampled = Greater (temperature, zero_f)
            draft_finite = {DOMAIN}.Finite (draft_logits)
            unread = Not (sampled)
            draft_passable = Or (draft_finite, unread)
            s_finite = And (target_finite, draft_passable)

            s_node_0 = Identity (nowhere)
            s_going_0 = Unsqueeze (s_finite, row_axis)
            s_left_0 = Identity (nowhere)
            {sampled_levels}
            s_steps = Concat <axis = 1> ({s_steps})

            bonus_row = GatherND <batch_dims = 1> (target_logits, s_node_{depth})
            bonus_rows = Unsqueeze (bonus_row, row_axis)
            bonus_weights = {DOMAIN}.Weights (bonus_rows, {sampling})
            bonus = Squeeze (bonus_weights, row_axis)
            weights = Where (s_going_{depth}, bonus, s_left_{depth})
            s_walked = Greater (s_steps, zero)
            s_walked_i = Cast <to = 7> (s_walked)
            s_accepted = ReduceSum (s_walked_i, row_axis)
            sample = Constant <value_int = {SAMPLE}> ()
            u_sample = Gather <axis = -1> (uniforms, sample)
            u = GatherElements <axis = 1> (u_sample, s_accepted)
            u_flat = Squeeze (u, row_axis)
            drawn = {DOMAIN}.Draw (weights, u_flat)
            drawn_column = Unsqueeze (drawn, row_axis)
            s_best = GatherElements <axis = 1> (best, s_node_{depth})
            sampled_column = Unsqueeze (sampled, row_axis)
            s_last = Where (sampled_column, drawn_column, s_best)
        }},
        else_branch = greedy () => (g_steps, g_last, g_finite)
        {{
            g_finite = Identity (target_finite)
            g_node_0 = Identity (nowhere)
            g_going_0 = Unsqueeze (target_finite, row_axis)
            {greedy_levels}
            g_steps = Concat <axis = 1> ({g_steps})
            g_last = GatherElements <axis = 1> (best, g_node_{depth})
        }}
    >

    path = Slice (steps, row_axis, end, row_axis)
    walked = Greater (path, zero)
    walked_i = Cast <to = 7> (walked)
    accepted = ReduceSum <keepdims = 0> (walked_i, row_axis)
    accepted_column = Unsqueeze (accepted, row_axis)
    path_tokens = GatherElements <axis = 1> (held, path)
    drafts = Concat <axis = 1> (path_tokens, nowhere)
    shape = Shape (drafts)
    columns = Gather (shape, one)
    column = Range (zero, columns, one)
    is_accepted = Less (column, accepted_column)
    is_last = Equal (column, accepted_column)
    finite_column = Unsqueeze (finite, row_axis)
    emits_last = And (is_last, finite_column)
    last_or_none = Where (emits_last, last, minus_one)
    tokens = Where (is_accepted, drafts, last_or_none)
}}
"""
