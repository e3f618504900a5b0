// Sixteen floats at a time. Included inside a namespace of its own by each translation unit, after that unit has chosen its
// instruction set, so that no inline function compiled for one processor is ever linked into the code for another.
//
// No include guard on purpose. KVB_AVX512 says that intrinsics may be used; without it these are plain vector extensions.

typedef float v16 __attribute__((vector_size(64)));
typedef float v16_unaligned __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint16_t h16_unaligned __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint8_t b16 __attribute__((vector_size(16)));
typedef uint8_t b16_unaligned __attribute__((vector_size(16), aligned(1), may_alias));

static inline v16 load(const float* p) { return *reinterpret_cast<const v16_unaligned*>(p); }
static inline void store(float* p, v16 v) { *reinterpret_cast<v16_unaligned*>(p) = v; }
static inline i16 load_i16(const void* p) {
  i16 v;
  __builtin_memcpy(&v, p, 64);
  return v;
}
static inline v16 splat(float x) { return x - v16{}; }
static inline v16 vmax(v16 a, v16 b) { return a > b ? a : b; }

static inline v16 fma(v16 a, v16 b, v16 c) {
#if KVB_AVX512
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// 2^x for x <= 0 or so; exactly 1 at 0, exactly 0 far below. Relative error about 1e-7.
static inline v16 exp2v(v16 x) {
#if KVB_AVX512
  v16 n = (v16)_mm512_roundscale_ps((__m512)x, 8);
#else
  x = vmax(x, splat(-140.0f));
  v16 n = (x + 12582912.0f) - 12582912.0f;
#endif
  v16 f = x - n;
  v16 p = splat(1.5403530e-4f);
  p = fma(p, f, splat(1.3333558e-3f));
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
#if KVB_AVX512
  return (v16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  i16 exponent = __builtin_convertvector(n, i16);
  v16 scaled = (v16)((i16)p + (exponent << 23));
  return n < -126.0f ? v16{} : scaled;
#endif
}

static inline v16 silu_times(v16 gate, v16 up) {
  v16 magnitude = vmax(gate, -gate);
  v16 e = exp2v(magnitude * -1.44269504f);  // of a number <= 0: never overflows
  v16 sigmoid_numerator = gate < 0.0f ? e : splat(1.0f);
  return gate * up * sigmoid_numerator / (e + 1.0f);
}

static inline float sum(v16 v) {
  float s[16];
  store(s, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  return s[0];
}

static inline h16 to_bf16(v16 v) {
#if KVB_AVX512_BF16
  return (h16)_mm512_cvtneps_pbh((__m512)v);
#else
  typedef uint32_t u16v __attribute__((vector_size(64)));
  u16v bits = (u16v)v;
  u16v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u16v is_nan = (u16v)((bits & 0x7fffffff) > 0x7f800000);
  rounded = (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan);
  return __builtin_convertvector(rounded, h16);
#endif
}

static inline v16 from_bf16(const uint16_t* p) {
  h16 half = *reinterpret_cast<const h16_unaligned*>(p);
  return (v16)(__builtin_convertvector(half, i16) << 16);
}

// Sixteen IEEE halves.
static inline v16 load_half(const uint8_t* p) {
#if KVB_AVX512
  return (v16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  v16 v;
  for (int i = 0; i < 16; i++) v[i] = half_to_float(uint16_t(p[2 * i] | p[2 * i + 1] << 8));
  return v;
#endif
}

// OCP e4m3fn: round to nearest even, saturating at 448; NaN stays NaN.
static inline b16 to_e4m3(v16 v) {
  i16 bits = (i16)v;
  i16 sign = (bits >> 24) & 0x80;
  i16 magnitude = bits & 0x7fffffff;
  i16 is_nan = magnitude > 0x7f800000;
  i16 normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  i16 subnormal = (i16)((v16)magnitude * 512.0f + 12582912.0f) & 0xff;  // steps of 2^-9, rounded by the addition
  i16 is_small = magnitude < 0x3c800000;                                 // below 2^-6
  i16 is_large = magnitude >= 0x43e00000;                                // 448 and above
  i16 code = is_small ? subnormal : normal;
  code = is_large ? i16{} + 0x7e : code;
  code = is_nan ? i16{} + 0x7f : code;
  return __builtin_convertvector(code | sign, b16);
}

static inline v16 from_e4m3(const uint8_t* p) {
  i16 code = __builtin_convertvector(*reinterpret_cast<const b16_unaligned*>(p), i16);
  i16 exponent_mantissa = code & 0x7f;
  i16 exponent = exponent_mantissa >> 3;
  v16 normal = (v16)((exponent_mantissa << 20) + (120 << 23));
  v16 subnormal = __builtin_convertvector(exponent_mantissa, v16) * 0x1p-9f;
  i16 magnitude = exponent == 0 ? (i16)subnormal : (i16)normal;
  magnitude = exponent_mantissa == 0x7f ? i16{} + 0x7fc00000 : magnitude;
  return (v16)(magnitude | ((code & 0x80) << 24));
}

static inline v16 load_kv(const uint8_t* p, int kv_type) {
  switch (kv_type) {
    case kKvF32: return load(reinterpret_cast<const float*>(p));
    case kKvBF16: return from_bf16(reinterpret_cast<const uint16_t*>(p));
    default: return from_e4m3(p);
  }
}

static inline void store_kv(uint8_t* p, int kv_type, v16 v) {
  switch (kv_type) {
    case kKvF32: store(reinterpret_cast<float*>(p), v); break;
    case kKvBF16: *reinterpret_cast<h16_unaligned*>(p) = to_bf16(v); break;
    default: *reinterpret_cast<b16_unaligned*>(p) = to_e4m3(v);
  }
}

static inline float rms_factor(const float* x, int width, int size, float eps) {
  v16 total = {};
  for (int i = 0; i < width; i += 16) total = fma(load(x + i), load(x + i), total);  // padding is zero
  return 1.0f / __builtin_sqrtf(sum(total) / float(size) + eps);
}

// One head of one row: optional RMS norm, then rotary, in place. Halves are (i, i + head_dim / 2).
static inline void norm_and_rotate(float* x, const float* norm, const float* cosines, const float* sines, int head_dim,
                                   float eps) {
  int half = head_dim / 2;
  if (norm) {
    float factor = rms_factor(x, head_dim, head_dim, eps);
    for (int i = 0; i < head_dim; i++) x[i] = x[i] * factor * norm[i];
  }
  for (int i = 0; i < half; i++) {
    float first = x[i], second = x[i + half];
    x[i] = first * cosines[i] - second * sines[i];
    x[i + half] = second * cosines[i] + first * sines[i];
  }
}

// After the QKV product of rows [begin, end): normalise and rotate q and k in place, and write K and V to their slots.
static void finish_qkv(Model& model, const Step& step, int layer, int begin, int end, float* qkv, int stride) {
  const Config& c = model.config;
  const Layer& weights = model.layers[layer];
  int hd = c.head_dim, half = hd / 2;
  const auto* cosines = static_cast<const float*>(model.cosines.data);
  const auto* sines = static_cast<const float*>(model.sines.data);
  size_t itemsize = model.kv_itemsize();
  for (const Segment& segment : segments_of(step, begin, end)) {
    for (int row = segment.begin; row < segment.end; row++) {
      float* x = qkv + size_t(row - begin) * stride;
      const float *cosine = cosines + size_t(row) * half, *sine = sines + size_t(row) * half;
      for (int h = 0; h < c.num_heads; h++) norm_and_rotate(x + h * hd, weights.q_norm, cosine, sine, hd, c.eps);
      for (int h = 0; h < c.num_kv_heads; h++) {
        float* key = x + (c.num_heads + h) * hd;
        const float* value = x + (c.num_heads + c.num_kv_heads + h) * hd;
        norm_and_rotate(key, weights.k_norm, cosine, sine, hd, c.eps);
        uint8_t* key_slot = model.kv_slot(step, layer, segment.seq, step.positions[row], 0, h);
        uint8_t* value_slot = model.kv_slot(step, layer, segment.seq, step.positions[row], 1, h);
        for (int i = 0; i < hd; i += 16) {
          store_kv(key_slot + i * itemsize, c.kv_type, load(key + i));
          store_kv(value_slot + i * itemsize, c.kv_type, load(value + i));
        }
      }
    }
  }
}
