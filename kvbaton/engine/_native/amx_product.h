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

static inline v16 gated(v16 gate, v16 up) {
  v16 e = (v16)exp2_bf16((__m512)(gate * -1.44269504f));
  e = (v16)_mm512_min_ps((__m512)e, _mm512_set1_ps(0x1p120f));  // so that the reciprocal stays a number
  v16 d = e + 1.0f;
  v16 reciprocal = (v16)_mm512_rcp14_ps((__m512)d);
  reciprocal = reciprocal * fma(-d, reciprocal, splat(2.0f));
  return gate * up * reciprocal;
}

// What 16 outputs from column `col` start from.
template <Epilogue E>
static inline __m512 start_row(const Target& out, int row, int col) {
  if (E == Epilogue::kAdd) return _mm512_loadu_ps(out.data + row * out.stride + col);
  return out.bias ? _mm512_loadu_ps(out.bias + col) : _mm512_setzero_ps();
}

// A row's 32 outputs of a panel, to where they belong.
template <Epilogue E>
static inline void finish_row(__m512 first, __m512 second, const Target& out, int row, int panel) {
  if (E == Epilogue::kSilu) {
    store_bf16(out.packed.at(row, panel * 16), gated((v16)first, (v16)second));
    return;
  }
  if (row >= out.rows) return;
  int left = out.columns - panel * 32;
  uint32_t mask = left >= 32 ? ~0u : (1u << left) - 1;
  float* to = out.data + row * out.stride + panel * 32;
  _mm512_mask_storeu_ps(to, __mmask16(mask), first);
  _mm512_mask_storeu_ps(to + 16, __mmask16(mask >> 16), second);
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

// The two tiles of a panel, [16 rows][16 columns] each.
template <Epilogue E>
static inline void finish_pair(const float* tiles, const Target& out, int row, int panel) {
#pragma GCC unroll 4
  for (int r = 0; r < 16; r++) finish_row<E>(_mm512_load_ps(tiles + r * 16), _mm512_load_ps(tiles + 256 + r * 16), out, row + r, panel);
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

template <Epilogue E>
static void bf16_product(Model& model, const Packed& x, int rows, const Linear& linear, const Target& out) {
  int row_tiles = int(round_up(rows, 16) / 16);
  int steps = (row_tiles + 1) / 2 * linear.groups, lines = int(linear.panel_bytes / 64 + steps - 1) / steps;
  model.pool->run(linear.panels, [&](int panel, int thread) {
    if (thread) configure_tiles();
    Prefetch ahead{reinterpret_cast<const char*>(linear.panel(std::min(panel + 1, linear.panels - 1))), lines};
    tiles_times_panel<E>(x, row_tiles, reinterpret_cast<const bf16_t*>(linear.panel(panel)), out, panel, ahead);
  });
}
