// Products with int8 and int4 weights. Included inside a namespace by amx_engine.cpp.
//
// Activations, bf16 numbers, are rounded to multiples of a power of two, one for each row and group of 32 values: a few bits finer
// than the last bit of the group's largest value, so that only the small ones lose bits. The product of a group with the integers
// that the weights are stored as then fits in 24 bits and is exact, in whatever order and by whatever instruction:
// 32 * 255 * 2^4 * 127 (int8) and 32 * 255 * 2^6 * 15 (int4) are below 2^24. Only what follows rounds, and is the same for any
// number of rows, group by group from 0 upwards:
//
//   sum = fma(exact product, the weights' scale, sum), and for int4: sum = fma(exact sum of the activations, minimum, sum)
//
// Few rows go through VNNI on the weights as they are stored, which leaves reading them as the only cost. Many rows go through
// bf16 tiles, for which a panel is unpacked once.

static constexpr int kFewRows = 8;
static constexpr unsigned kLowestExponent = 27;  // biased: groups below 2^-100 are rounded as if at it, so that nothing is subnormal

constexpr int finer_bits(bool int4) { return int4 ? 6 : 4; }

// A group of one row of activations, rounded: 16 values of even k, 16 of odd k, multiples of 2^(exponent - 127 - 7 - finer bits).
struct Rounded {
  __m512 even, odd;
  unsigned exponent;
};

static inline float power_of_two(unsigned exponent) { return _mm512_cvtss_f32((__m512)_mm512_set1_epi32(int(exponent << 23))); }

template <bool INT4>
static inline Rounded round_group(const bf16_t* x) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), upper = _mm512_set1_epi32(int(0xffff0000));
  __m512i both = _mm512_load_si512(x), even = _mm512_slli_epi32(both, 16), odd = _mm512_and_si512(both, upper);
  __m512i larger = _mm512_max_epu32(_mm512_and_si512(even, magnitude), _mm512_and_si512(odd, magnitude));
  unsigned largest = _mm512_reduce_max_epu32(larger);
  unsigned exponent = std::max(largest >> 23, kLowestExponent);
  // Adding 1.5 * 2^23 times the last bit leaves no room for smaller bits. Infinity, NaN and beyond 2^112 become NaN: loud.
  unsigned magic_bits = exponent + 16 < 255 ? ((exponent + 16 - finer_bits(INT4)) << 23) | 0x400000 : 0x7fc00000;
  __m512 magic = (__m512)_mm512_set1_epi32(int(magic_bits));
  __m512 rounded_even = _mm512_sub_ps(_mm512_add_ps((__m512)even, magic), magic);
  __m512 rounded_odd = _mm512_sub_ps(_mm512_add_ps((__m512)odd, magic), magic);
  return {rounded_even, rounded_odd, exponent};
}

static inline float sum_of(const Rounded& group) { return _mm512_reduce_add_ps(_mm512_add_ps(group.even, group.odd)); }  // exact

// ---- few rows: VNNI --------------------------------------------------------------------------------------------------

// A rounded group as integers, each high * 2^(finer bits + 1) + low: VNNI multiplies bytes.
struct alignas(64) Digits {
  int8_t high[32], low[32];
  float unit, sum;     // what 1 stands for; the sum of the group
  int32_t offset;      // -128 times the sum of the integers: int8 weights are stored with 128 added
};

template <bool INT4>
static void digits_of(const bf16_t* x, Digits& out) {
  constexpr int kFiner = finer_bits(INT4), kLowBits = kFiner + 1;
  Rounded group = round_group<INT4>(x);
  bool finite = group.exponent + 16 < 255;
  __m512 inverse = _mm512_set1_ps(power_of_two(finite ? 261 + kFiner - group.exponent : 127));
  __m512i even = _mm512_cvtps_epi32(_mm512_mul_ps(group.even, inverse));
  __m512i odd = _mm512_cvtps_epi32(_mm512_mul_ps(group.odd, inverse));
  __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
  _mm256_store_si256((__m256i*)out.high, _mm512_cvtepi16_epi8(_mm512_srai_epi16(words, kLowBits)));
  __m512i low = _mm512_and_si512(words, _mm512_set1_epi16((1 << kLowBits) - 1));
  _mm256_store_si256((__m256i*)out.low, _mm512_cvtepi16_epi8(low));
  out.unit = finite ? power_of_two(group.exponent - 7 - kFiner) : __builtin_nanf("");
  out.sum = sum_of(group);
  out.offset = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(even, odd));
}

static inline __m512 half_scales(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

static inline __m512i four_of_k(const void* digits, int quad) {  // the same four in every column
  int32_t four;
  std::memcpy(&four, static_cast<const char*>(digits) + quad * 4, 4);
  return _mm512_set1_epi32(four);
}

// 16 columns times 4 k, unsigned: the quad-th such part of a tile.
template <bool INT4>
static inline __m512i stored_quad(const uint8_t* tile, int quad) {
  if (!INT4) return _mm512_loadu_si512(tile + quad * 64);
  __m512i bits = _mm512_loadu_si512(tile + quad % 4 * 64);
  return _mm512_and_si512(quad < 4 ? bits : _mm512_srli_epi16(bits, 4), _mm512_set1_epi8(15));
}

template <bool INT4> static inline const uint8_t* stored_tile(const uint8_t* group, int tile) {
  return INT4 ? group + 128 + tile * 256 : group + 64 + tile * 512;
}

template <int ROWS, bool INT4>
static inline void add_group(const Digits* const* x, const uint8_t* group, __m512 (*sums)[2]) {
  __m512i high[ROWS][2], low[ROWS][2];
  for (int r = 0; r < ROWS; r++) {
    high[r][0] = high[r][1] = _mm512_setzero_si512();
    low[r][0] = low[r][1] = INT4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x[r]->offset);
  }
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; quad++) {
    __m512i first = stored_quad<INT4>(stored_tile<INT4>(group, 0), quad);
    __m512i second = stored_quad<INT4>(stored_tile<INT4>(group, 1), quad);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      __m512i h = four_of_k(x[r]->high, quad), l = four_of_k(x[r]->low, quad);
      high[r][0] = _mm512_dpbusd_epi32(high[r][0], first, h);
      high[r][1] = _mm512_dpbusd_epi32(high[r][1], second, h);
      low[r][0] = _mm512_dpbusd_epi32(low[r][0], first, l);
      low[r][1] = _mm512_dpbusd_epi32(low[r][1], second, l);
    }
  }
  for (int tile = 0; tile < 2; tile++) {
    __m512 scale = half_scales(group + tile * 32);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      __m512i product = _mm512_add_epi32(_mm512_slli_epi32(high[r][tile], finer_bits(INT4) + 1), low[r][tile]);
      __m512 exact = _mm512_mul_ps(_mm512_cvtepi32_ps(product), _mm512_set1_ps(x[r]->unit));
      sums[r][tile] = _mm512_fmadd_ps(exact, scale, sums[r][tile]);
      if (INT4) sums[r][tile] = _mm512_fmadd_ps(_mm512_set1_ps(x[r]->sum), half_scales(group + 64 + tile * 32), sums[r][tile]);
    }
  }
}

template <int ROWS, Epilogue E, bool INT4>
static void few_times_panel(const Digits* x, const Linear& linear, const Target& out, int row, int panel, Prefetch& ahead) {
  const Digits* rows[ROWS];
  __m512 sums[ROWS][2];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = x + size_t(row + r) * linear.groups;
    for (int tile = 0; tile < 2; tile++) sums[r][tile] = start_row<E>(out, row + r, panel * 32 + tile * 16);
  }
  const uint8_t* group = linear.panel(panel);
  for (int g = 0; g < linear.groups; g++, group += INT4 ? kInt4GroupBytes : kInt8GroupBytes) {
    ahead.step();
    add_group<ROWS, INT4>(rows, group, sums);
    for (int r = 0; r < ROWS; r++) rows[r]++;
  }
  for (int r = 0; r < ROWS; r++) finish_row<E>(sums[r][0], sums[r][1], out, row + r, panel);
}

template <Epilogue E, bool INT4>
static void few_product(Model& model, const Packed& x, int rows, const Linear& linear, const Target& out) {
  auto* digits = model.digits.as<Digits>(size_t(rows) * linear.groups);
  for (int row = 0; row < rows; row++)
    for (int g = 0; g < linear.groups; g++) digits_of<INT4>(x.at(row, g * 32), digits[size_t(row) * linear.groups + g]);
  int steps = (rows / 4 + rows % 4 / 2 + rows % 2) * linear.groups, lines = int(linear.panel_bytes / 64 + steps - 1) / steps;
  model.pool->run(linear.panels, [&](int panel, int) {
    Prefetch ahead{reinterpret_cast<const char*>(linear.panel(std::min(panel + 1, linear.panels - 1))), lines};
    int row = 0;
    for (; row + 4 <= rows; row += 4) few_times_panel<4, E, INT4>(digits, linear, out, row, panel, ahead);
    for (; row + 2 <= rows; row += 2) few_times_panel<2, E, INT4>(digits, linear, out, row, panel, ahead);
    if (row < rows) few_times_panel<1, E, INT4>(digits, linear, out, row, panel, ahead);
  });
}

// ---- many rows: tiles ------------------------------------------------------------------------------------------------

// A panel's integers as B tiles of bf16, and its scales as floats.
struct Unpacked {
  bf16_t* tiles;     // [groups][2][512]
  float* scales;     // [groups][32]
  float* minimums;   // [groups][32], int4
};

static inline __m512i interleave_high_halves(__m512 a, __m512 b) {
  const __m512i odd = _mm512_set_epi16(63, 31, 61, 29, 59, 27, 57, 25, 55, 23, 53, 21, 51, 19, 49, 17, 47, 15, 45, 13, 43, 11,
                                       41, 9, 39, 7, 37, 5, 35, 3, 33, 1);
  return _mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b);
}

static inline void unpack_int8_tile(const uint8_t* tile, bf16_t* out) {
  const __m512i byte = _mm512_set1_epi32(255), base = _mm512_set1_epi32(0x4b000000);  // the float 2^23, whose last bit is 1
  const __m512 offset = _mm512_set1_ps(8388608.0f + 128.0f);
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; quad++, out += 64) {
    __m512i bits = _mm512_load_si512(tile + quad * 64);
    __m512 k[4];
    for (int i = 0; i < 4; i++)  // (bits >> 8 i) & 255 | base
      k[i] = _mm512_sub_ps((__m512)_mm512_ternarylogic_epi32(_mm512_srli_epi32(bits, 8 * i), byte, base, 0xea), offset);
    _mm512_store_si512(out, interleave_high_halves(k[0], k[1]));
    _mm512_store_si512(out + 32, interleave_high_halves(k[2], k[3]));
  }
}

static inline void unpack_int4_tile(const uint8_t* tile, bf16_t* out) {
  // The two bytes of the bf16 numbers 0 to 15, four to a word.
  const __m512i low = _mm512_broadcast_i32x4(_mm_set_epi32(0x70605040, 0x30201000, int(0xe0c0a080), 0x40008000));
  const __m512i high = _mm512_broadcast_i32x4(_mm_set_epi32(0x41414141, 0x41414141, 0x40404040, 0x40403f00));
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; quad++, out += 64) {
    __m512i codes = stored_quad<true>(tile, quad);
    __m512i a = _mm512_shuffle_epi8(low, codes), b = _mm512_shuffle_epi8(high, codes);
    __m512 first = (__m512)_mm512_unpacklo_epi8(a, b), second = (__m512)_mm512_unpackhi_epi8(a, b);  // columns 0 1, 2 3 of four
    _mm512_store_ps(out, _mm512_shuffle_ps(first, second, 0x88));
    _mm512_store_ps(out + 32, _mm512_shuffle_ps(first, second, 0xdd));
  }
}

static Unpacked unpack_panel(const Linear& linear, int index, Buffer& buffer) {
  const bool int4 = linear.format == kInt4;
  const uint8_t* group = linear.panel(index);
  Unpacked out;
  out.scales = buffer.as<float>(size_t(linear.groups) * (64 + 512 * 2));
  out.minimums = out.scales + size_t(linear.groups) * 32;
  out.tiles = reinterpret_cast<bf16_t*>(out.minimums + size_t(linear.groups) * 32);
  for (int g = 0; g < linear.groups; g++, group += int4 ? kInt4GroupBytes : kInt8GroupBytes) {
    for (int tile = 0; tile < 2; tile++) {
      bf16_t* to = out.tiles + size_t(g) * 1024 + tile * 512;
      _mm512_store_ps(out.scales + g * 32 + tile * 16, half_scales(group + tile * 32));
      if (int4) {
        _mm512_store_ps(out.minimums + g * 32 + tile * 16, half_scales(group + 64 + tile * 32));
        unpack_int4_tile(stored_tile<true>(group, tile), to);
      } else {
        unpack_int8_tile(stored_tile<false>(group, tile), to);
      }
    }
  }
  return out;
}

template <int C, int A, int B>
static inline void group_product(const bf16_t* a, const bf16_t* b, float* out) {
  tile_zero<C>();
  tile_load<A>(a, 64);
  tile_load<B>(b, 64);
  tile_product<C, A, B>();
  tile_store<C>(out, 64);
}

// 16 rows times 16 columns. sums: of the activations, [groups][16 rows].
template <Epilogue E, bool INT4>
static inline void scaled_tile(const bf16_t* a, const float* sums, const Unpacked& w, int groups, int half, const Target& out,
                               int row, int panel, float* result, Prefetch& ahead) {
  constexpr int kBehind = 2;  // groups between a product and its use: the store must have reached L1
  alignas(64) float ring[4][256];
  __m512 sum[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sum[i] = start_row<E>(out, row + i, panel * 32 + half * 16);
  const bf16_t* b = w.tiles + half * 512;
  const float* scales = w.scales + half * 16;
  for (int g = 0; g < groups + kBehind; g++, a += 512, b += 1024) {
    ahead.step();
    if (g < groups) {
      if (g % 2)
        group_product<1, 5, 7>(a, b, ring[g % 4]);
      else
        group_product<0, 4, 6>(a, b, ring[g % 4]);
    }
    if (g < kBehind) continue;
    const float* exact = ring[(g - kBehind) % 4];
    __m512 scale = _mm512_load_ps(scales);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(_mm512_load_ps(exact + i * 16), scale, sum[i]);
    if (INT4) {
      __m512 minimum = _mm512_load_ps(scales + size_t(groups) * 32);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(sums[i]), minimum, sum[i]);
    }
    scales += 32;
    sums += 16;
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_ps(result + i * 16, sum[i]);
}

template <Epilogue E, bool INT4>
static void many_product(Model& model, const Packed& x, int rows, const Linear& linear, const Target& out) {
  const int groups = linear.groups, row_tiles = int(round_up(rows, 16) / 16);
  auto* sums = model.group_sums.as<float>(size_t(row_tiles) * groups * 16);
  model.pool->run(row_tiles, [&](int tile, int) {
    for (int row = tile * 16; row < std::min(rows, tile * 16 + 16); row++)
      for (int g = 0; g < groups; g++) {
        bf16_t* at = x.at(row, g * 32);
        Rounded group = round_group<INT4>(at);
        __m512i upper = (__m512i)group.odd, lower = _mm512_srli_epi32((__m512i)group.even, 16);
        _mm512_store_si512(at, _mm512_or_si512(upper, lower));
        if (INT4) sums[(size_t(tile) * groups + g) * 16 + row % 16] = sum_of(group);
      }
  });
  int steps = row_tiles * 2 * groups, lines = int(linear.panel_bytes / 64 + steps - 1) / steps;
  model.pool->run(linear.panels, [&](int panel, int thread) {
    if (thread) configure_tiles();
    Prefetch ahead{reinterpret_cast<const char*>(linear.panel(std::min(panel + 1, linear.panels - 1))), lines};
    Unpacked w = unpack_panel(linear, panel, model.scratch[thread].panel);
    alignas(64) float result[2][256];
    fence();
    for (int tile = 0; tile < row_tiles; tile++) {
      const float* tile_sums = sums + size_t(tile) * groups * 16;
      for (int half = 0; half < 2; half++)
        scaled_tile<E, INT4>(x.tile(tile, 0), tile_sums, w, groups, half, out, tile * 16, panel, result[half], ahead);
      finish_pair<E>(result[0], out, tile * 16, panel);
    }
  });
}

// ---- any format ------------------------------------------------------------------------------------------------------

// Weights of fewer bits round the activations in place.
template <Epilogue E>
static void product(Model& model, const Packed& x, int rows, const Linear& linear, Target out) {
  out.bias = linear.bias;
  if (E == Epilogue::kAdd) out.columns = int(out.stride), out.rows = int(round_up(rows, 16));
  if (linear.format == kBF16) return bf16_product<E>(model, x, rows, linear, out);
  auto* run = linear.format == kInt4 ? (rows <= kFewRows ? few_product<E, true> : many_product<E, true>)
                                     : (rows <= kFewRows ? few_product<E, false> : many_product<E, false>);
  run(model, x, rows, linear, out);
}
