// Products on AMX tiles: activations as A, weight panels as B, float32 sums in C. Included inside a namespace by amx_engine.cpp.
//
// Activations are packed in tiles: tile (row / 16, k / 32) is 1 KiB, one row of it 32 bf16. Every output element is the sum
// over k tiles from 0 upwards, started from bias or residual, whatever the number of rows: one row costs a whole tile, which
// is free where reading the weights is the limit.

typedef uint16_t bf16_t;

// Our own wrappers, because the compiler's are macros that cannot take a template argument as a register number. Loads name no
// memory, so that they may overlap; fence() stands wherever ordinary stores come before.
template <int T> static inline void tile_load(const void* p, size_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T));
}
template <int T> static inline void tile_store(void* p, size_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> static inline void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int C, int A, int B> static inline void tile_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
static inline void fence() { __asm__ volatile("" : : : "memory"); }

static void configure_tiles() {
  static const struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

struct Packed {  // bf16 activations in tiles
  bf16_t* data;
  int k_tiles;
  // The 16 columns from `col` (a multiple of 16) of a row.
  bf16_t* at(int row, int col) const {
    return data + (size_t(row / 16) * k_tiles + col / 32) * 512 + (row % 16) * 32 + col % 32;
  }
  const bf16_t* tile(int row_tile, int k_tile) const { return data + (size_t(row_tile) * k_tiles + k_tile) * 512; }
};

static inline void store_bf16(bf16_t* p, v16 v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v)); }

// ---- weight panels ---------------------------------------------------------------------------------------------------

static inline void transpose16(__m512i r[16]) {  // 16 x 16 dwords
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

static inline void transpose_tile(const void* from, void* to) {
  __m512i r[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * 64);
  transpose16(r);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(static_cast<char*>(to) + i * 64, r[i]);
}

static inline __m512 half_scales(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// One quantised tile to 16 rows (columns of the output) of 32 k, bf16: an A operand.
static inline void unpack_int8(const uint8_t* group, int tile, __m512i rows[16]) {
  alignas(64) float scale[16];
  _mm512_store_ps(scale, half_scales(group + tile * 32));
  const uint8_t* q = group + 64 + tile * 512;
#pragma GCC unroll 16
  for (int row = 0; row < 16; row++, q += 32) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)q)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(q + 16))));
    __m512 s = _mm512_set1_ps(scale[row]);
    rows[row] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, s), _mm512_mul_ps(low, s));
  }
}

// A row has 16 values only: rounded once to a table, two rows to a register, then looked up.
static inline void unpack_int4(const uint8_t* group, int tile, __m512i rows[16]) {
  const __m512 levels = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
  alignas(64) float scale[16], minimum[16];
  _mm512_store_ps(scale, half_scales(group + tile * 32));
  _mm512_store_ps(minimum, half_scales(group + 64 + tile * 32));
  const uint8_t* q = group + 128 + tile * 256;
#pragma GCC unroll 4
  for (int row = 0; row < 16; row += 4, q += 64) {
    __m512 value[4];
    for (int i = 0; i < 4; i++)
      value[i] = _mm512_fmadd_ps(levels, _mm512_set1_ps(scale[row + i]), _mm512_set1_ps(minimum[row + i]));
    __m512i first_pair = (__m512i)_mm512_cvtne2ps_pbh(value[1], value[0]);
    __m512i second_pair = (__m512i)_mm512_cvtne2ps_pbh(value[3], value[2]);
    __m512i bits = _mm512_loadu_si512(q);
    rows[row] = _mm512_permutexvar_epi16(_mm512_and_si512(bits, nibble), first_pair);
    // (bits >> 4) & 15 | 16 and so on, one ternary operation each.
    rows[row + 1] = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(_mm512_srli_epi16(bits, 4), nibble, second, 0xea), first_pair);
    rows[row + 2] = _mm512_permutexvar_epi16(_mm512_and_si512(_mm512_srli_epi16(bits, 8), nibble), second_pair);
    rows[row + 3] = _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_srli_epi16(bits, 12), second), second_pair);
  }
}

static inline void unpack_tile(const uint8_t* group, Format format, int tile, __m512i rows[16]) {
  if (format == kInt8)
    unpack_int8(group, tile, rows);
  else
    unpack_int4(group, tile, rows);
}

static inline size_t group_bytes(Format format) { return format == kInt8 ? kInt8GroupBytes : kInt4GroupBytes; }

static inline void store_tile(bf16_t* to, const __m512i rows[16]) {
  for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 32, rows[i]);
}

// A whole panel as B operands, for many rows of activations.
static const bf16_t* bf16_panel(const Linear& linear, int index, Buffer& buffer) {
  const uint8_t* panel = linear.panel(index);
  if (linear.format == kBF16) return reinterpret_cast<const bf16_t*>(panel);
  auto* out = buffer.as<bf16_t>(size_t(linear.groups) * 1024);
  for (int group = 0; group < linear.groups; group++, panel += group_bytes(linear.format)) {
    for (int tile = 0; tile < 2; tile++) {
      __m512i rows[16];
      unpack_tile(panel, linear.format, tile, rows);
      transpose16(rows);
      store_tile(out + group * 1024 + tile * 512, rows);
    }
  }
  return out;
}

// ---- products --------------------------------------------------------------------------------------------------------

enum class Epilogue { kStore, kAdd, kSilu };

struct Target {
  float* data = nullptr;  // kStore, kAdd: rows padded to 16 unless `rows` and `columns` clip
  size_t stride = 0;
  int rows = 0, columns = 0;  // that exist; a store never passes them
  Packed packed = {};         // kSilu
  const float* bias = nullptr;
};

// Fetches the next panel while this one is used: `lines` per k step, so that it is all there in time.
struct Prefetch {
  const char* next;
  int lines;
  inline void step() {
    for (int i = 0; i < lines; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};

static void silu_tile(const float* gate, const float* up, const Target& out, int row, int panel) {
  bf16_t* to = out.packed.at(row, panel * 16);
#pragma GCC unroll 4
  for (int r = 0; r < 16; r++) {
    v16 g = load(gate + r * 16), u = load(up + r * 16);
    v16 e = (v16)exp2_bf16((__m512)(g * -1.44269504f));
    e = (v16)_mm512_min_ps((__m512)e, _mm512_set1_ps(0x1p120f));  // so that the reciprocal stays a number
    v16 d = e + 1.0f;
    v16 reciprocal = (v16)_mm512_rcp14_ps((__m512)d);
    reciprocal = reciprocal * fma(-d, reciprocal, splat(2.0f));
    store_bf16(to + r * 32, g * u * reciprocal);
  }
}

static void clipped_store(const float* tile, const Target& out, int row, int col) {
  for (int r = 0; r < 16 && row + r < out.rows; r++)
    for (int c = 0; c < 16 && col + c < out.columns; c++) out.data[(row + r) * out.stride + col + c] = tile[r * 16 + c];
}

// Where the tile pair (row tile, panel) starts and ends. C tiles C0 and C1 are template arguments because the instructions
// name their registers.
template <int C0, int C1, Epilogue E>
static inline void start_pair(const Target& out, int row, int panel, const float* bias_tile) {
  if (E == Epilogue::kAdd) {
    tile_load<C0>(out.data + row * out.stride + panel * 32, out.stride * 4);
    tile_load<C1>(out.data + row * out.stride + panel * 32 + 16, out.stride * 4);
  } else if (out.bias) {
    tile_load<C0>(bias_tile, 0);
    tile_load<C1>(bias_tile + 16, 0);
  } else {
    tile_zero<C0>();
    tile_zero<C1>();
  }
}

// The two tiles of a panel, [16 rows][16 columns] each, to where they belong.
template <Epilogue E>
static inline void finish_pair(const float* tiles, const Target& out, int row, int panel) {
  if (E == Epilogue::kSilu) {
    silu_tile(tiles, tiles + 256, out, row, panel);
  } else {
    clipped_store(tiles, out, row, panel * 32);
    clipped_store(tiles + 256, out, row, panel * 32 + 16);
  }
}

template <int C0, int C1, Epilogue E>
static inline void end_pair(const Target& out, int row, int panel) {
  if (E == Epilogue::kAdd || (E == Epilogue::kStore && row + 16 <= out.rows && panel * 32 + 32 <= out.columns)) {
    tile_store<C0>(out.data + row * out.stride + panel * 32, out.stride * 4);
    tile_store<C1>(out.data + row * out.stride + panel * 32 + 16, out.stride * 4);
    return;
  }
  alignas(64) float tiles[512];
  tile_store<C0>(tiles, 64);
  tile_store<C1>(tiles + 256, 64);
  finish_pair<E>(tiles, out, row, panel);
}

template <Epilogue E>
static void tiles_times_panel(const Packed& x, int row_tiles, const bf16_t* w, const Target& out, int panel, Prefetch ahead) {
  int k_tiles = x.k_tiles, tile = 0;
  const float* bias = out.bias ? out.bias + panel * 32 : nullptr;
  fence();
  for (; tile + 2 <= row_tiles; tile += 2) {
    const bf16_t *a0 = x.tile(tile, 0), *a1 = x.tile(tile + 1, 0), *b = w;
    start_pair<0, 1, E>(out, tile * 16, panel, bias);
    start_pair<2, 3, E>(out, tile * 16 + 16, panel, bias);
    for (int k = 0; k < k_tiles; k++, a0 += 512, a1 += 512, b += 1024) {
      ahead.step();
      tile_load<6>(b, 64);
      tile_load<4>(a0, 64);
      tile_product<0, 4, 6>();
      tile_load<7>(b + 512, 64);
      tile_product<1, 4, 7>();
      tile_load<5>(a1, 64);
      tile_product<2, 5, 6>();
      tile_product<3, 5, 7>();
    }
    end_pair<0, 1, E>(out, tile * 16, panel);
    end_pair<2, 3, E>(out, tile * 16 + 16, panel);
  }
  if (tile < row_tiles) {
    const bf16_t *a = x.tile(tile, 0), *b = w;
    start_pair<0, 1, E>(out, tile * 16, panel, bias);
    for (int k = 0; k < k_tiles; k++, a += 512, b += 1024) {
      ahead.step();
      tile_load<4>(a, 64);
      tile_load<6>(b, 64);
      tile_product<0, 4, 6>();
      tile_load<7>(b + 512, 64);
      tile_product<1, 4, 7>();
    }
    end_pair<0, 1, E>(out, tile * 16, panel);
  }
}

// Up to 16 rows times a quantised panel, the other way round: y^T = W x^T, W unpacked tile by tile as the A operand, into a ring
// small enough for L1. The same products in the same order, so the same bits as above.
template <Epilogue E>
static void narrow_times_panel(const bf16_t* x, int rows, const Linear& linear, const Target& out, int panel, Prefetch ahead) {
  alignas(64) bf16_t ring[4][1024];
  alignas(64) float tiles[512], turned[512];
  for (int half = 0; half < 2; half++) {
    int col = panel * 32 + half * 16;
    for (int i = 0; i < 16; i++) {
      __m512 row = _mm512_setzero_ps();
      if (E == Epilogue::kAdd && i < rows) row = _mm512_loadu_ps(out.data + i * out.stride + col);
      if (E != Epilogue::kAdd && out.bias) row = _mm512_loadu_ps(out.bias + col);
      _mm512_store_ps(tiles + half * 256 + i * 16, row);
    }
    transpose_tile(tiles + half * 256, turned + half * 256);
  }
  fence();
  tile_load<0>(turned, 64);
  tile_load<1>(turned + 256, 64);
  constexpr int kBehind = 2;  // groups between unpacking and use: the stores must have reached L1
  const uint8_t* group = linear.panel(panel);
  for (int k = 0; k < linear.groups + kBehind; k++, group += group_bytes(linear.format)) {
    ahead.step();
    if (k < linear.groups) {
      for (int tile = 0; tile < 2; tile++) {
        __m512i weights[16];
        unpack_tile(group, linear.format, tile, weights);
        store_tile(ring[k % 4] + tile * 512, weights);
      }
    }
    fence();
    if (k < kBehind) continue;
    const bf16_t* w = ring[(k - kBehind) % 4];
    tile_load<6>(x + (k - kBehind) * 512, 64);
    tile_load<4>(w, 64);
    tile_product<0, 4, 6>();
    tile_load<5>(w + 512, 64);
    tile_product<1, 5, 6>();
  }
  tile_store<0>(turned, 64);
  tile_store<1>(turned + 256, 64);
  transpose_tile(turned, tiles);
  transpose_tile(turned + 256, tiles + 256);
  Target clipped = out;
  clipped.rows = rows;
  if (E == Epilogue::kAdd) clipped.columns = int(out.stride);
  finish_pair<E>(tiles, clipped, 0, panel);
}

template <Epilogue E>
static void narrow_product(Model& model, const Packed& x, int rows, const Linear& linear, const Target& out) {
  auto* turned = model.narrow.as<bf16_t>(size_t(linear.groups) * 512);
  for (int k = 0; k < linear.groups; k++) transpose_tile(x.tile(0, k), turned + k * 512);
  int lines = int(linear.panel_bytes / 64 / linear.groups) + 1;
  model.pool->run(linear.panels, [&](int panel, int thread) {
    if (thread) configure_tiles();
    Prefetch ahead{reinterpret_cast<const char*>(linear.panel(std::min(panel + 1, linear.panels - 1))), lines};
    narrow_times_panel<E>(turned, rows, linear, out, panel, ahead);
  });
}

template <Epilogue E>
static void product(Model& model, const Packed& x, int rows, const Linear& linear, Target out) {
  int row_tiles = int(round_up(rows, 16) / 16);
  out.bias = linear.bias;
  if (row_tiles == 1 && linear.format != kBF16) return narrow_product<E>(model, x, rows, linear, out);
  int steps = (row_tiles + 1) / 2 * linear.groups, lines = int(linear.panel_bytes / 64 + steps - 1) / steps;
  model.pool->run(linear.panels, [&](int panel, int thread) {
    if (thread) configure_tiles();
    Prefetch ahead{reinterpret_cast<const char*>(linear.panel(std::min(panel + 1, linear.panels - 1))), lines};
    tiles_times_panel<E>(x, row_tiles, bf16_panel(linear, panel, model.scratch[thread].panel), out, panel, ahead);
  });
}
