"""GPU kernels: how they are compiled and launched, and one folder an operator."""
