// What the recurrent layers differ in: gates a unit, and the functions between the products.
//
// LSTM  i, f, g, o;  c' = f c + i g,  h' = o tanh(c')
// GRU   r, z, n;     n = tanh(x_n + r q), q = W_hn h + b_hn,  h' = (1 - z) n + z h
// RNN   h' = tanh or relu

constexpr int LSTM = 0, GRU = 1, RNN_TANH = 2, RNN_RELU = 3;
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
// Values a unit that are kept for backward, side by side with the gates' inputs, and gradients a
// unit that it makes. GRU keeps r, z, n, q and makes dn, dr, dz, dq: the first three belong to the
// input's product, the last three to the recurrent one.
constexpr int KEPT = CELL == LSTM || CELL == GRU ? 4 : 1;
constexpr int ROWS = GATES * UNITS;  // of the recurrent matrix, a block's; row = unit * GATES + gate

template <class H>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<BFloat16> = true;

// As __expf, less the steps that keep results below 2^-126: they are added to one here.
__device__ __forceinline__ float exp_approximate(float x) {
  return exp2_approximate(1.44269504f * x);
}
// The multiprocessors have a tanh, right to 2^-11 of the result: less than bf16 rounds.
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (IS_BFLOAT16<T>) return 0.5f + 0.5f * tanh_approximate(0.5f * x);
  if constexpr (PRECISION == SPLIT)
    return __fdividef(1.0f, 1.0f + expf(-x));
  else
    return __fdividef(1.0f, 1.0f + exp_approximate(-x));
}
// The fast form is right to 1e-7 absolutely, where TF32 and half precision see no more; near zero,
// where that is much of the result, two terms of the series are right to 5e-6 of it.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  if constexpr (IS_BFLOAT16<T>) {
    return tanh_approximate(x);
  } else if constexpr (PRECISION == SPLIT) {
    return tanhf(x);
  } else {
    const float fast = 1.0f - __fdividef(2.0f, 1.0f + exp_approximate(2.0f * x));
    return fabsf(x) < 0.08f ? x - x * x * x * (1.0f / 3.0f) : fast;
  }
}
// Of lanes that stand side by side: a tanh where it is asked for, else a sigmoid, by one way for both.
__device__ __forceinline__ float tanh_or_sigmoid(float x, bool is_tanh) {
  if constexpr (IS_BFLOAT16<T>) {
    const float half = tanh_approximate(is_tanh ? x : 0.5f * x);
    return is_tanh ? half : 0.5f + 0.5f * half;
  } else if constexpr (PRECISION == SPLIT) {
    return is_tanh ? hyperbolic_tangent(x) : sigmoid(x);
  } else {
    const float fraction = __fdividef(1.0f, 1.0f + exp_approximate(is_tanh ? -2.0f * x : -x));
    const float near_zero = x - x * x * x * (1.0f / 3.0f);
    const float tangent = fabsf(x) < 0.08f ? near_zero : 2.0f * fraction - 1.0f;
    return is_tanh ? tangent : fraction;
  }
}
__device__ __forceinline__ float activation(float x) {
  if constexpr (CELL == RNN_RELU)
    return x > 0.0f || x != x ? x : 0.0f;
  else
    return hyperbolic_tangent(x);
}
