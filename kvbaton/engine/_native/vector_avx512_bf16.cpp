// The vector engine with AVX-512 that multiplies pairs of bfloat16.
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "model.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")

#define KVB_AVX512 1
#define KVB_AVX512_BF16 1

namespace kvb {
namespace avx512_bf16 {
#include "vector_ops.h"
#include "vector_engine.h"
}  // namespace avx512_bf16
const Engine* avx512_bf16_engine() { return &avx512_bf16::kEngine; }
}  // namespace kvb
#pragma GCC pop_options
#else
namespace kvb {
const Engine* avx512_bf16_engine() { return nullptr; }
}  // namespace kvb
#endif
