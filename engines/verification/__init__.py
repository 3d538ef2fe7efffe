"""Verification: which draft tokens the target accepts, and the token that follows them.

The definitions, in numpy: `reference` of chains, `tree_reference` of trees whose drafts are point masses
and of typical acceptance, `drawn_reference` of trees whose siblings were drawn. `function`,
`tree_function` and `drawn_function` are the same as ONNX functions, token for token.
"""
