"""Verification: which draft tokens the target accepts, and the token that follows them.

`reference` is the definition, in numpy. `function` is the same as ONNX functions, token for token.
"""
