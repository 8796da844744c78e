"""Large fp32 matrix products on bf16 tensor cores."""
