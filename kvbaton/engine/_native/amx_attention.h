// Paged attention on AMX tiles. Included inside a namespace by amx_engine.cpp.
//
// A lane is a (row, head) pair; 16 lanes share a KV head and are the columns of every tile:
//
//   S^T [keys][lanes] = K [keys][d]   . Q^T [d][lanes]      K read from its block where it lies
//   O^T [d][lanes]   += V^T [d][keys] . P^T [keys][lanes]   V transposed once per segment and KV head
//
// Keys are walked in tiles of 64 that start at multiples of 64 in the sequence, for each lane alike, with a running maximum.
// A hidden key contributes exactly zero and a tile hidden altogether changes no bit, so a lane's result depends neither on
// the other lanes nor on chunk or block borders.

static constexpr int kKeyTile = 64;

static void transpose16(__m512i r[16]) {  // 16 x 16 dwords
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

// The keys and values of one segment and KV head, ready for the tiles.
struct Context {
  const bf16_t** keys;  // per 16 keys: first row
  size_t key_stride;    // bytes
  bf16_t* values;       // per 32 keys: [d padded to 16][32]
  int first, limit;     // first key staged (a multiple of 64), end of the keys that exist
  int d_tiles, k_steps; // ceil(head_dim / 16), ceil(head_dim / 32)
  int window;
};

static inline __m512i load_kv32(const uint8_t* row, int col, int count, int kv_type) {  // 32 bf16, zero past `count`
  if (kv_type == kKvBF16) {
    __mmask32 mask = count - col >= 32 ? ~0u : (1u << (count - col)) - 1;
    return _mm512_maskz_loadu_epi16(mask, row + col * 2);
  }
  size_t itemsize = kv_type == kKvF32 ? 4 : 1;
  __m512 low = (__m512)load_kv(row + col * itemsize, kv_type), high = _mm512_setzero_ps();
  if (col + 16 < count) high = (__m512)load_kv(row + (col + 16) * itemsize, kv_type);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

static void stage_values(Model& model, const Step& step, int layer, int seq, int kv_head, const Context& c) {
  const int hd = model.config.head_dim;
  const __m512i pick_low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                            36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i pick_high = _mm512_add_epi16(pick_low, _mm512_set1_epi16(16));
  for (int start = c.first; start < round_up(c.limit, kKeyTile); start += 32) {
    bf16_t* out = c.values + size_t(start - c.first) * c.d_tiles * 16;
    const uint8_t* rows[32];
    for (int t = 0; t < 32; t++)
      rows[t] = start + t < c.limit ? model.kv_slot(step, layer, seq, start + t, 1, kv_head) : nullptr;
    for (int col = 0; col < hd; col += 32) {
      __m512i low[16], high[16];
      for (int pair = 0; pair < 16; pair++) {
        const uint8_t *first = rows[2 * pair], *second = rows[2 * pair + 1];
        __m512i a = first ? load_kv32(first, col, hd, model.config.kv_type) : _mm512_setzero_si512();
        __m512i b = second ? load_kv32(second, col, hd, model.config.kv_type) : _mm512_setzero_si512();
        low[pair] = _mm512_permutex2var_epi16(a, pick_low, b);
        high[pair] = _mm512_permutex2var_epi16(a, pick_high, b);
      }
      transpose16(low);
      for (int d = 0; d < 16; d++) _mm512_store_si512(out + size_t(col + d) * 32, low[d]);
      if (col + 16 >= hd) break;
      transpose16(high);
      for (int d = 0; d < 16; d++) _mm512_store_si512(out + size_t(col + 16 + d) * 32, high[d]);
    }
  }
}

// K rows straight from the cache where 16 keys of a block are a tile; otherwise copied, padded with zeros.
static void stage_keys(Model& model, const Step& step, int layer, int seq, int kv_head, Context& c, ThreadScratch& scratch) {
  const Config& config = model.config;
  int tiles = int(round_up(c.limit, kKeyTile) - c.first) / 16;
  bool direct = config.kv_type == kKvBF16 && config.block_size % 16 == 0 && config.head_dim % 32 == 0;
  size_t width = size_t(c.k_steps) * 32;
  // One tile of zeros for keys that do not exist, then the copies.
  auto* copies = scratch.keys.as<bf16_t>((direct ? 1 : tiles + 1) * 16 * width);
  std::memset(copies, 0, 32 * width);
  c.keys = scratch.key_pointers.as<const bf16_t*>(tiles);
  c.key_stride = width * 2;
  for (int tile = 0; tile < tiles; tile++) {
    int start = c.first + tile * 16;
    if (start >= c.limit) {
      c.keys[tile] = copies;
    } else if (direct) {
      c.keys[tile] = reinterpret_cast<const bf16_t*>(model.kv_slot(step, layer, seq, start, 0, kv_head));
    } else {
      bf16_t* to = copies + size_t(tile + 1) * 16 * width;
      c.keys[tile] = to;
      for (int t = 0; t < 16; t++) {
        const uint8_t* from = start + t < c.limit ? model.kv_slot(step, layer, seq, start + t, 0, kv_head) : nullptr;
        for (size_t col = 0; col < width; col += 32) {
          __m512i v = from ? load_kv32(from, int(col), config.head_dim, config.kv_type) : _mm512_setzero_si512();
          _mm512_storeu_si512(to + t * width + col, v);
        }
      }
    }
  }
}

struct Lanes {
  alignas(64) int position[16];
  const bf16_t* query[16];  // null: an unused lane
  int row[16], head[16];
  int count, first, last;
};

struct LaneState {
  bf16_t* query;     // B tiles [k_steps][16][16][2]
  float* out;        // O^T [d][16]
  float* scores;     // S^T [64][16]
  bf16_t* weights;   // P^T, B tiles [2][16][16][2]
  __m512 largest, total;
};

static void pack_queries(const Lanes& lanes, int k_steps, bf16_t* out) {
  for (int step = 0; step < k_steps; step++) {
    __m512i r[16];
    for (int lane = 0; lane < 16; lane++)
      r[lane] = lanes.query[lane] ? _mm512_loadu_si512(lanes.query[lane] + step * 32) : _mm512_setzero_si512();
    transpose16(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(out + step * 512 + i * 32, r[i]);
  }
}

static inline void score_tile(const Context& c, const bf16_t* const* keys, const LaneState& s) {
  fence();
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int step = 0; step < c.k_steps; step++) {
    tile_load<6>(s.query + step * 512, 64);
    tile_load<4>(keys[0] + step * 32, c.key_stride);
    tile_product<0, 4, 6>();
    tile_load<5>(keys[1] + step * 32, c.key_stride);
    tile_product<1, 5, 6>();
    tile_load<4>(keys[2] + step * 32, c.key_stride);
    tile_product<2, 4, 6>();
    tile_load<5>(keys[3] + step * 32, c.key_stride);
    tile_product<3, 5, 6>();
  }
  tile_store<0>(s.scores, 64);
  tile_store<1>(s.scores + 256, 64);
  tile_store<2>(s.scores + 512, 64);
  tile_store<3>(s.scores + 768, 64);
}

static inline void hide(float* scores, __m512i position, int start, int window) {
  for (int t = 0; t < kKeyTile; t++) {
    __m512i key = _mm512_set1_epi32(start + t);
    __mmask16 visible = _mm512_cmple_epi32_mask(key, position);
    if (window) visible &= _mm512_cmpgt_epi32_mask(key, _mm512_sub_epi32(position, _mm512_set1_epi32(window)));
    _mm512_store_ps(scores + t * 16, _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), visible,
                                                        _mm512_load_ps(scores + t * 16)));
  }
}

// Scores to weights with the running maximum; rescales O where the maximum moved (elsewhere it would multiply by exactly 1).
static inline void soften(const Context& c, LaneState& s, __m512 scale) {
  __m512 peak[4];
  for (int u = 0; u < 4; u++) peak[u] = _mm512_load_ps(s.scores + u * 16);
  for (int t = 4; t < kKeyTile; t += 4)
    for (int u = 0; u < 4; u++) peak[u] = _mm512_max_ps(peak[u], _mm512_load_ps(s.scores + (t + u) * 16));
  __m512 top = _mm512_max_ps(_mm512_max_ps(peak[0], peak[1]), _mm512_max_ps(peak[2], peak[3]));
  __m512 largest = _mm512_max_ps(s.largest, _mm512_mul_ps(top, scale));
  if (_mm512_cmpneq_ps_mask(largest, s.largest)) {
    __m512 correction = (__m512)exp2_fast((v16)_mm512_sub_ps(s.largest, largest));
    s.total = _mm512_mul_ps(s.total, correction);
    for (int d = 0; d < c.d_tiles * 16; d++)
      _mm512_store_ps(s.out + d * 16, _mm512_mul_ps(_mm512_load_ps(s.out + d * 16), correction));
    s.largest = largest;
  }
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                              20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int t = 0; t < kKeyTile; t += 2) {
    __m512 a = (__m512)exp2_fast((v16)_mm512_fmsub_ps(_mm512_load_ps(s.scores + t * 16), scale, largest));
    __m512 b = (__m512)exp2_fast((v16)_mm512_fmsub_ps(_mm512_load_ps(s.scores + t * 16 + 16), scale, largest));
    even = _mm512_add_ps(even, a);
    odd = _mm512_add_ps(odd, b);
    __m512i both = _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    _mm512_store_si512(s.weights + t * 16, both);
  }
  s.total = _mm512_add_ps(s.total, _mm512_add_ps(even, odd));
}

template <int C>
static inline void add_values(const bf16_t* values, size_t chunk, float* out) {
  tile_load<C>(out, 64);
  tile_load<4>(values, 64);
  tile_product<C, 4, 6>();
  tile_load<5>(values + chunk, 64);
  tile_product<C, 5, 7>();
  tile_store<C>(out, 64);
}

static inline void value_tile(const Context& c, const bf16_t* values, const LaneState& s) {
  size_t chunk = size_t(c.d_tiles) * 512;  // the next 32 keys
  fence();
  tile_load<6>(s.weights, 64);
  tile_load<7>(s.weights + 512, 64);
  int d = 0;
  for (; d + 4 <= c.d_tiles; d += 4) {
    add_values<0>(values + d * 512, chunk, s.out + d * 256);
    add_values<1>(values + d * 512 + 512, chunk, s.out + d * 256 + 256);
    add_values<2>(values + d * 512 + 1024, chunk, s.out + d * 256 + 512);
    add_values<3>(values + d * 512 + 1536, chunk, s.out + d * 256 + 768);
  }
  for (; d < c.d_tiles; d++) add_values<0>(values + d * 512, chunk, s.out + d * 256);
}

static void attend_lanes(const Context& c, const Lanes& lanes, float attention_scale, int head_dim, const Packed& out,
                         Buffer& buffer) {
  auto* memory = buffer.as<float>(size_t(c.d_tiles) * 256 + 1024 + 512 + size_t(c.k_steps) * 256);
  LaneState s;
  s.out = memory;
  s.scores = s.out + c.d_tiles * 256;
  s.weights = reinterpret_cast<bf16_t*>(s.scores + 1024);
  s.query = s.weights + 1024;
  s.largest = _mm512_set1_ps(-1e30f);
  s.total = _mm512_setzero_ps();
  std::memset(s.out, 0, size_t(c.d_tiles) * 1024);
  pack_queries(lanes, c.k_steps, s.query);
  __m512 scale = _mm512_set1_ps(attention_scale * 1.44269504f);
  __m512i position = _mm512_load_si512(lanes.position);
  int start = c.window && lanes.first >= c.window ? (lanes.first - c.window + 1) / kKeyTile * kKeyTile : 0;
  for (; start <= lanes.last; start += kKeyTile) {
    score_tile(c, c.keys + (start - c.first) / 16, s);
    bool all_visible = start + kKeyTile - 1 <= lanes.first && (!c.window || lanes.last - c.window < start);
    if (!all_visible) hide(s.scores, position, start, c.window);
    soften(c, s, scale);
    value_tile(c, c.values + size_t(start - c.first) * c.d_tiles * 16, s);
  }
  __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), s.total);
  for (int d = 0; d < head_dim; d += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(s.out + (d + i) * 16), inverse);
    transpose16(r);
    for (int lane = 0; lane < lanes.count; lane++)
      store_bf16(out.at(lanes.row[lane], lanes.head[lane] * head_dim + d), (v16)r[lane]);
  }
}

// queries: bf16 [rows][heads][head_dim padded to 32]
static void attend(Model& model, const Step& step, int layer, int begin, int end, const bf16_t* queries, const Packed& out) {
  const Config& config = model.config;
  auto segments = segments_of(step, begin, end);
  int group = model.group_heads(), k_steps = int(round_up(config.head_dim, 32) / 32), width = k_steps * 32;
  model.pool->run(int(segments.size()) * config.num_kv_heads, [&](int task, int thread) {
    if (thread) configure_tiles();
    ThreadScratch& scratch = model.scratch[thread];
    const Segment& s = segments[task / config.num_kv_heads];
    int kv_head = task % config.num_kv_heads, pairs = (s.end - s.begin) * group;
    Context c;
    c.window = model.layers[layer].window;
    c.limit = step.positions[s.end - 1] + 1;
    int oldest = step.positions[s.begin];
    c.first = c.window && oldest >= c.window ? (oldest - c.window + 1) / kKeyTile * kKeyTile : 0;
    c.d_tiles = (config.head_dim + 15) / 16;
    c.k_steps = k_steps;
    c.values = scratch.values.as<bf16_t>(size_t(round_up(c.limit, kKeyTile) - c.first) * c.d_tiles * 16);
    stage_keys(model, step, layer, s.seq, kv_head, c, scratch);
    stage_values(model, step, layer, s.seq, kv_head, c);
    for (int base = 0; base < pairs; base += 16) {
      Lanes lanes;
      lanes.count = std::min(16, pairs - base);
      for (int lane = 0; lane < 16; lane++) {
        int pair = base + std::min(lane, lanes.count - 1), row = s.begin + pair / group;
        lanes.position[lane] = step.positions[row];
        lanes.row[lane] = row - begin;
        lanes.head[lane] = kv_head * group + pair % group;
        const bf16_t* query = queries + (size_t(row - begin) * config.num_heads + lanes.head[lane]) * width;
        lanes.query[lane] = lane < lanes.count ? query : nullptr;
      }
      lanes.first = lanes.position[0];
      lanes.last = lanes.position[15];
      attend_lanes(c, lanes, config.attention_scale, config.head_dim, out, scratch.lanes);
    }
  });
}
