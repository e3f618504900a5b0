// Attention of at most four lanes, which is decode: one row and its query heads. Included inside a namespace by amx_engine.cpp.
//
// The same sums as amx_attention.h in the same order, hence the same bits, with tiles cut to four lanes:
//
//   S^T [16 keys][4 lanes] = K [16 keys][d] . Q^T [d][4 lanes]     four keys to a register, so softening costs a quarter
//   O   [4 lanes][16 d]   += P [4 lanes][32 keys] . V [32 keys][d]  V interleaved by pairs of keys, not transposed

static constexpr int kFewLanes = 4;

// Tiles 0, 1 and 2: scores and Q^T, four lanes wide. 3, 4: K or V. 5, 6, 7: O and P, four lanes high.
static void configure_few_lanes() {
  static const struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {16, 16, 16, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 4, 4, 4};
  } config;
  _tile_loadconfig(&config);
}

struct FewLanes {
  bf16_t* query;       // [k_steps][16 d pairs][4 lanes][2]
  float* scores[2];    // [64 keys][4 lanes]
  bf16_t* weights;     // [2 x 32 keys]: [4 lanes][32]
  bf16_t* values;      // [2 x 32 keys][d / 16]: [16 key pairs][16 d][2]
  float* out;          // [d / 16]: [4 lanes][16]
  __m512 largest, total;  // of lane i % 4
};

static void pack_few_queries(const Lanes& lanes, int k_steps, bf16_t* out) {
  std::memset(out, 0, size_t(k_steps) * 256);
  for (int lane = 0; lane < lanes.count; lane++)
    for (int pair = 0; pair < k_steps * 16; pair++) std::memcpy(out + pair * 8 + lane * 2, lanes.query[lane] + pair * 2, 4);
}

template <int C>
static inline void score_few(const Context& c, const FewLanes& s, const bf16_t* key, float* scores) {
  tile_zero<C>();
  for (int step = 0; step < c.k_steps; step++) {
    tile_load<2>(s.query + step * 128, 16);
    tile_load<3 + C>(key + step * 32, c.key_stride);
    tile_product<C, 3 + C, 2>();
  }
  tile_store<C>(scores, 16);
}

static inline void score_few_keys(const Context& c, const FewLanes& s, int tile, float* scores) {
  score_few<0>(c, s, c.keys[tile], scores);
  score_few<1>(c, s, c.keys[tile + 1], scores + 64);
  score_few<0>(c, s, c.keys[tile + 2], scores + 128);
  score_few<1>(c, s, c.keys[tile + 3], scores + 192);
}

static inline void interleave_values(const Rows& rows, int start, const Context& c, int head_dim, int kv_type, bf16_t* out) {
  const __m512i pick_low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                            36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i pick_high = _mm512_add_epi16(pick_low, _mm512_set1_epi16(16));
  for (int run = 0; run < 8; run++) {
    int first = start + run * 8, exist = std::min(8, c.limit - first);
    const uint8_t* row = exist > 0 ? rows.run(first) : nullptr;
    bf16_t* to = out + size_t(run / 4) * c.d_tiles * 512 + run % 4 * 128;
    for (int key = 0; key < 8; key += 2, row += 2 * rows.row_bytes, to += 32) {
      for (int col = 0; col < head_dim; col += 32) {
        __m512i a = key < exist ? load_kv32(row, col, head_dim, kv_type) : _mm512_setzero_si512();
        __m512i b = key + 1 < exist ? load_kv32(row + rows.row_bytes, col, head_dim, kv_type) : _mm512_setzero_si512();
        _mm512_store_si512(to + col / 16 * 512, _mm512_permutex2var_epi16(a, pick_low, b));
        if (col + 16 < head_dim) _mm512_store_si512(to + (col / 16 + 1) * 512, _mm512_permutex2var_epi16(a, pick_high, b));
      }
    }
  }
}

static inline __m512 across_keys(__m512 v, bool is_max) {  // of the four keys in a register, in every one of them
  __m512 a = _mm512_shuffle_f32x4(v, v, 0xb1);             // keys 1 0 3 2
  v = is_max ? _mm512_max_ps(v, a) : _mm512_add_ps(v, a);
  __m512 b = _mm512_shuffle_f32x4(v, v, 0x4e);             // keys 2 3 0 1
  return is_max ? _mm512_max_ps(v, b) : _mm512_add_ps(v, b);
}

static inline void hide_few(float* scores, __m512i position, int start, int window) {
  __m512i key = _mm512_add_epi32(_mm512_set1_epi32(start), _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0));
  for (int t = 0; t < 16; t++, key = _mm512_add_epi32(key, _mm512_set1_epi32(4))) {
    __mmask16 visible = _mm512_cmple_epi32_mask(key, position);
    if (window) visible &= _mm512_cmpgt_epi32_mask(key, _mm512_sub_epi32(position, _mm512_set1_epi32(window)));
    _mm512_store_ps(scores + t * 16, _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), visible,
                                                        _mm512_load_ps(scores + t * 16)));
  }
}

static inline void rescale_few(const Context& c, FewLanes& s, __m512 correction) {
  alignas(64) float factor[16];
  _mm512_store_ps(factor, correction);
  s.total = _mm512_mul_ps(s.total, correction);
  for (int d = 0; d < c.d_tiles; d++)
    for (int lane = 0; lane < kFewLanes; lane++) {
      float* row = s.out + d * 64 + lane * 16;
      _mm512_store_ps(row, _mm512_mul_ps(_mm512_load_ps(row), _mm512_set1_ps(factor[lane])));
    }
}

// 64 keys: scores to weights [lane][key], rescaling what was summed so far where the maximum moved.
static inline void soften_few(const Context& c, FewLanes& s, const float* scores, __m512 scale) {
  __m512 peak = _mm512_load_ps(scores);
  for (int t = 1; t < 16; t++) peak = _mm512_max_ps(peak, _mm512_load_ps(scores + t * 16));
  __m512 largest = _mm512_max_ps(s.largest, _mm512_mul_ps(across_keys(peak, true), scale));
  if (_mm512_cmpneq_ps_mask(largest, s.largest)) rescale_few(c, s, exp2_bf16(_mm512_sub_ps(s.largest, largest)));
  s.largest = largest;
  // Word 8 * lane + key of eight keys: the high half of element 4 * key + lane.
  const __m512i gather = _mm512_set_epi16(63, 55, 47, 39, 31, 23, 15, 7, 61, 53, 45, 37, 29, 21, 13, 5, 59, 51, 43, 35, 27, 19, 11,
                                          3, 57, 49, 41, 33, 25, 17, 9, 1);
  const __m512i half = _mm512_set1_epi32(0x8000);
  __m512 added = _mm512_setzero_ps();
  for (int chunk = 0; chunk < 2; chunk++, scores += 128) {
    __m512i eight[4];
    for (int i = 0; i < 4; i++) {
      __m512 a = exp2_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + i * 32), scale, largest));
      __m512 b = exp2_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + i * 32 + 16), scale, largest));
      added = _mm512_add_ps(_mm512_add_ps(added, a), b);
      eight[i] = _mm512_permutex2var_epi16(_mm512_add_epi32((__m512i)a, half), gather, _mm512_add_epi32((__m512i)b, half));
    }
    __m512i t0 = _mm512_shuffle_i32x4(eight[0], eight[1], 0x44), t1 = _mm512_shuffle_i32x4(eight[0], eight[1], 0xee);
    __m512i t2 = _mm512_shuffle_i32x4(eight[2], eight[3], 0x44), t3 = _mm512_shuffle_i32x4(eight[2], eight[3], 0xee);
    bf16_t* to = s.weights + chunk * 128;
    _mm512_store_si512(to, _mm512_shuffle_i32x4(t0, t2, 0x88));
    _mm512_store_si512(to + 32, _mm512_shuffle_i32x4(t0, t2, 0xdd));
    _mm512_store_si512(to + 64, _mm512_shuffle_i32x4(t1, t3, 0x88));
    _mm512_store_si512(to + 96, _mm512_shuffle_i32x4(t1, t3, 0xdd));
  }
  s.total = _mm512_add_ps(s.total, across_keys(added, false));
}

static inline void add_few_values(const Context& c, const FewLanes& s) {
  for (int d = 0; d < c.d_tiles; d++) {
    tile_load<5>(s.out + d * 64, 64);
    tile_load<7>(s.weights, 64);
    tile_load<3>(s.values + d * 512, 64);
    tile_product<5, 7, 3>();
    tile_load<6>(s.weights + 128, 64);
    tile_load<4>(s.values + (c.d_tiles + d) * 512, 64);
    tile_product<5, 6, 4>();
    tile_store<5>(s.out + d * 64, 64);
  }
}

static void attend_few(const Context& c, const Rows& rows, const Lanes& lanes, const Config& config, const Packed& out,
                       const Ahead& ahead, Buffer& buffer) {
  auto* memory = buffer.as<float>(512 + 128 + size_t(c.k_steps) * 64 + size_t(c.d_tiles) * (64 + 512));
  FewLanes s;
  s.scores[0] = memory;
  s.scores[1] = memory + 256;
  s.weights = reinterpret_cast<bf16_t*>(memory + 512);
  s.query = s.weights + 256;
  s.values = s.query + c.k_steps * 128;
  s.out = reinterpret_cast<float*>(s.values + c.d_tiles * 1024);
  s.largest = _mm512_set1_ps(-1e30f);
  s.total = _mm512_setzero_ps();
  std::memset(s.out, 0, size_t(c.d_tiles) * 256);
  pack_few_queries(lanes, c.k_steps, s.query);
  const __m512 scale = _mm512_set1_ps(config.attention_scale * 1.44269504f);
  const __m512i position = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)lanes.position));
  const int begin = c.first;
  fence();
  score_few_keys(c, s, 0, s.scores[0]);
  for (int start = begin, place = 0; start <= lanes.last; start += kKeyTile, place ^= 1) {
    if (start + kKeyTile <= lanes.last) score_few_keys(c, s, (start + kKeyTile - c.first) / 16, s.scores[place ^ 1]);
    for (int run = 0; run < 8; run++) {
      ahead.fetch(ahead.keys, start, run);
      ahead.fetch(ahead.values, start, run);
    }
    interleave_values(rows, start, c, config.head_dim, config.kv_type, s.values);
    bool all_visible = start + kKeyTile - 1 <= lanes.first && (!c.window || lanes.last - c.window < start);
    if (!all_visible) hide_few(s.scores[place], position, start, c.window);
    soften_few(c, s, s.scores[place], scale);
    fence();
    add_few_values(c, s);
  }
  alignas(64) float inverse[16];
  _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.0f), s.total));
  for (int lane = 0; lane < lanes.count; lane++)
    for (int d = 0; d < config.head_dim; d += 16) {
      __m512 row = _mm512_mul_ps(_mm512_load_ps(s.out + d * 4 + lane * 16), _mm512_set1_ps(inverse[lane]));
      store_bf16(out.at(lanes.row[lane], lanes.head[lane] * config.head_dim + d), (v16)row);
    }
}
