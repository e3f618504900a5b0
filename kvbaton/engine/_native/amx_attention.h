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

// The keys and values of one segment and KV head, ready for the tiles.
struct Context {
  const bf16_t** keys;   // per 16 keys: first row
  size_t key_stride;     // bytes
  bf16_t* values;        // per 32 keys: [d padded to 16][32]
  int first, limit;      // first key staged (a multiple of 64), end of the keys that exist
  int d_tiles, k_steps;  // ceil(head_dim / 16), ceil(head_dim / 32)
  int window;
  int end() const { return int(round_up(limit, kKeyTile)); }
};

// Where one head's rows of one sequence lie: 8 keys are always one run, as block sizes are multiples of 8.
struct Rows {
  const uint8_t* base;  // block 0 of this layer, part and head
  const int32_t* blocks;
  size_t block_stride, row_bytes;
  int block_size;
  Rows(const Model& model, const Step& step, int layer, int seq, int part, int head)
      : base(model.kv_head(step, layer, 0, part, head)),
        blocks(step.block_table + size_t(seq) * step.max_blocks),
        block_stride(model.head_block_bytes() * 2 * model.config.num_kv_heads),
        row_bytes(model.kv_itemsize() * model.config.head_dim),
        block_size(model.config.block_size) {}
  const uint8_t* run(int key) const {
    unsigned position = unsigned(key), size = unsigned(block_size);
    return base + size_t(blocks[position / size]) * block_stride + (position % size) * row_bytes;
  }
};

// The keys and values of the task after this one, fetched while this one computes: evenly over its work, because a burst of
// fetches would stall it.
struct Ahead {
  Rows keys, values;
  int limit;
  void fetch(const Rows& rows, int start, int run) const {  // the run-th 8 keys of a tile
    int key = start + run * 8;
    if (key >= limit) return;
    const char* p = reinterpret_cast<const char*>(rows.run(key));
    for (size_t i = 0; i < 8 * rows.row_bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
  }
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

static void stage_values(const Model& model, const Rows& rows, int start, const Context& c) {  // 32 keys
  const int hd = model.config.head_dim, kv_type = model.config.kv_type;
  const __m512i pick_low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                            36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i pick_high = _mm512_add_epi16(pick_low, _mm512_set1_epi16(16));
  bf16_t* out = c.values + size_t(start - c.first) * c.d_tiles * 16;
  int exist = std::min(32, c.limit - start);
  const uint8_t* runs[4];
  for (int i = 0; i < 4; i++) runs[i] = i * 8 < exist ? rows.run(start + i * 8) : nullptr;
  for (int col = 0; col < hd; col += 32) {
    __m512i low[16], high[16];
    for (int pair = 0; pair < 16; pair++) {
      const uint8_t* row = runs[pair / 4] + (pair % 4) * 2 * rows.row_bytes;
      __m512i a = pair * 2 < exist ? load_kv32(row, col, hd, kv_type) : _mm512_setzero_si512();
      __m512i b = pair * 2 + 1 < exist ? load_kv32(row + rows.row_bytes, col, hd, kv_type) : _mm512_setzero_si512();
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

// K rows straight from the cache where 16 keys of a block are a tile; otherwise copied, padded with zeros.
static void stage_keys(const Model& model, const Rows& rows, Context& c, ThreadScratch& scratch) {
  const Config& config = model.config;
  int tiles = (c.end() - c.first) / 16;
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
      c.keys[tile] = reinterpret_cast<const bf16_t*>(rows.run(start));
    } else {
      bf16_t* to = copies + size_t(tile + 1) * 16 * width;
      c.keys[tile] = to;
      for (int t = 0; t < 16; t++) {
        bool exists = start + t < c.limit;
        const uint8_t* from = exists ? rows.run(start + t / 8 * 8) + (t % 8) * rows.row_bytes : nullptr;
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

// Sixteen lanes on their way through the keys.
struct LaneState {
  bf16_t* query;  // B tiles [k_steps][16][16][2]
  float* out;     // O^T [d][16]
  __m512 largest, total;
};

// Up to kGroups lane groups walk together, so that K and V come from L2 once for all of them: more and their state would not
// stay in L1. Stage i is one group at one tile of keys. While the vector unit softens stage i, the tile unit scores stage
// i + 1 and adds the values of stage i - 1; hence two places for scores and weights.
static constexpr int kGroups = 4;

struct Walk {
  LaneState groups[kGroups];
  int num_groups;
  float* scores[2];    // S^T [64][16]
  bf16_t* weights[2];  // P^T, B tiles [2][16][16][2]
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

// The tile work of a stage comes in four slots, spread over the vector work. Products that follow each other go to different
// C tiles, because one after another in the same tile waits for three times as long.

template <int HALF>
static inline void score_keys(const Context& c, const LaneState& s, int tile, int step) {  // 32 of 64 keys, 32 of d
  if (HALF == 0) tile_load<6>(s.query + step * 512, 64);
  tile_load<4>(c.keys[tile + HALF * 2] + step * 32, c.key_stride);
  tile_product<HALF * 2, 4, 6>();
  tile_load<5>(c.keys[tile + HALF * 2 + 1] + step * 32, c.key_stride);
  tile_product<HALF * 2 + 1, 5, 6>();
}

static inline void score_slot(const Context& c, const LaneState& s, int tile, int slot, float* scores) {
  if (slot == 0) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int half = c.k_steps * slot / 2; half < c.k_steps * (slot + 1) / 2; half++) {
    if (half % 2 == 0)
      score_keys<0>(c, s, tile, half / 2);
    else
      score_keys<1>(c, s, tile, half / 2);
  }
  if (slot == 3) {
    tile_store<0>(scores, 64);
    tile_store<1>(scores + 256, 64);
    tile_store<2>(scores + 512, 64);
    tile_store<3>(scores + 768, 64);
  }
}

template <int C, int CHUNK>
static inline void value_product(const Context& c, const LaneState& s, const bf16_t* values, int d) {  // 16 of d, 32 keys
  if (d >= c.d_tiles) return;
  if (CHUNK == 0) tile_load<C>(s.out + d * 256, 64);
  tile_load<4 + C % 2>(values + (CHUNK * c.d_tiles + d) * 512, 64);
  tile_product<C, 4 + C % 2, 6 + CHUNK>();
}

template <int C>
static inline void store_out(const Context& c, const LaneState& s, int d) {
  if (d < c.d_tiles) tile_store<C>(s.out + d * 256, 64);
}

// O^T += V^T P^T; the weights' tiles are in 6 and 7.
static inline void value_slot(const Context& c, const LaneState& s, const bf16_t* values, int slot) {
  int batches = (c.d_tiles + 3) / 4;  // four tiles of O at a time, each in four steps
  for (int step = batches * slot; step < batches * (slot + 1); step++) {
    int d = step / 4 * 4;
    switch (step % 4) {
      case 0:
        value_product<0, 0>(c, s, values, d);
        value_product<1, 0>(c, s, values, d + 1);
        break;
      case 1:
        value_product<2, 0>(c, s, values, d + 2);
        value_product<3, 0>(c, s, values, d + 3);
        break;
      case 2:
        value_product<0, 1>(c, s, values, d);
        value_product<1, 1>(c, s, values, d + 1);
        break;
      default:
        value_product<2, 1>(c, s, values, d + 2);
        value_product<3, 1>(c, s, values, d + 3);
        store_out<0>(c, s, d);
        store_out<1>(c, s, d + 1);
        store_out<2>(c, s, d + 2);
        store_out<3>(c, s, d + 3);
    }
  }
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

// The new maximum, and by how much what was summed so far shrinks; false where it is exactly 1 for every lane.
static inline bool raise_largest(LaneState& s, const float* scores, __m512 scale, __m512* correction) {
  __m512 peak[4];
  for (int u = 0; u < 4; u++) peak[u] = _mm512_load_ps(scores + u * 16);
  for (int t = 4; t < kKeyTile; t += 4)
    for (int u = 0; u < 4; u++) peak[u] = _mm512_max_ps(peak[u], _mm512_load_ps(scores + (t + u) * 16));
  __m512 top = _mm512_max_ps(_mm512_max_ps(peak[0], peak[1]), _mm512_max_ps(peak[2], peak[3]));
  __m512 largest = _mm512_max_ps(s.largest, _mm512_mul_ps(top, scale));
  bool raised = _mm512_cmpneq_ps_mask(largest, s.largest) != 0;
  if (raised) *correction = exp2_bf16(_mm512_sub_ps(s.largest, largest));
  s.largest = largest;
  return raised;
}

// Eight keys: scores to weights, and their sum to `added` (one number per key modulo 4, which fixes the order).
static inline void soften(const float* scores, bf16_t* weights, __m512 scale, __m512 largest, __m512* added) {
  // The high halves of two rows, interleaved: keys 2j and 2j + 1 of a lane are neighbours in a B tile.
  const __m512i high_halves = _mm512_set_epi16(63, 31, 61, 29, 59, 27, 57, 25, 55, 23, 53, 21, 51, 19, 49, 17, 47, 15, 45, 13, 43,
                                               11, 41, 9, 39, 7, 37, 5, 35, 3, 33, 1);
  const __m512i half = _mm512_set1_epi32(0x8000);
#pragma GCC unroll 4
  for (int t = 0; t < 8; t += 2) {
    __m512 a = exp2_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + t * 16), scale, largest));
    __m512 b = exp2_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + t * 16 + 16), scale, largest));
    added[t % 4] = _mm512_add_ps(added[t % 4], a);
    added[t % 4 + 1] = _mm512_add_ps(added[t % 4 + 1], b);
    __m512i rounded_a = _mm512_add_epi32((__m512i)a, half), rounded_b = _mm512_add_epi32((__m512i)b, half);
    _mm512_store_si512(weights + t * 16, _mm512_permutex2var_epi16(rounded_a, high_halves, rounded_b));
  }
}

static inline void prefetch_lines(const void* p, int lines) {
  for (int i = 0; i < lines; i++) _mm_prefetch(static_cast<const char*>(p) + i * 64, _MM_HINT_T0);
}

static void walk_keys(const Context& c, const Lanes* lanes, Walk& w, float attention_scale, const Ahead& ahead) {
  const __m512 scale = _mm512_set1_ps(attention_scale * 1.44269504f);
  const int groups = w.num_groups, oldest = lanes[0].first, last = lanes[groups - 1].last;
  const int begin = c.window && oldest >= c.window ? (oldest - c.window + 1) / kKeyTile * kKeyTile : 0;
  const size_t tile_values = size_t(kKeyTile) * c.d_tiles * 16;
  fence();
  for (int part = 0; part < 4; part++) score_slot(c, w.groups[0], (begin - c.first) / 16, part, w.scores[0]);
  const bf16_t* values = c.values + size_t(begin - c.first) * c.d_tiles * 16;
  int place = 0;
  for (int start = begin; start <= last; start += kKeyTile, values += tile_values) {
    const bool more_keys = start + kKeyTile <= last;
    const int tile = (start - c.first) / 16;
    for (int g = 0; g < groups; g++, place ^= 1) {
      LaneState& s = w.groups[g];
      float* scores = w.scores[place];
      const bool last_group = g + 1 == groups, next = !last_group || more_keys, previous = g > 0 || start > begin;
      const LaneState& next_state = w.groups[last_group ? 0 : g + 1];
      const LaneState& previous_state = w.groups[g > 0 ? g - 1 : groups - 1];
      const int next_tile = last_group ? tile + 4 : tile;
      const bf16_t* previous_values = g > 0 ? values : values - tile_values;
      bool all_visible = start + kKeyTile - 1 <= lanes[g].first && (!c.window || lanes[g].last - c.window < start);
      if (!all_visible) hide(scores, _mm512_load_si512(lanes[g].position), start, c.window);
      __m512 correction, added[4] = {};
      const bool raised = raise_largest(s, scores, scale, &correction);
      for (int part = 0; part < 4; part++) {
        if (next) score_slot(c, next_state, next_tile, part, w.scores[place ^ 1]);
        if (more_keys && g + 2 >= groups) prefetch_lines(c.keys[tile + 4 + part], g + 2 == groups || groups == 1 ? c.k_steps * 16 : 0);
        if (g == 0) ahead.fetch(ahead.values, start, part);
        soften(scores + part * 128, w.weights[place] + part * 128, scale, s.largest, added);
      }
      if (previous) {
        tile_load<6>(w.weights[place ^ 1], 64);
        tile_load<7>(w.weights[place ^ 1] + 512, 64);
      }
      for (int part = 0; part < 4; part++) {
        if (previous) value_slot(c, previous_state, previous_values, part);
        if (more_keys && last_group) prefetch_lines(values + tile_values + part * c.d_tiles * 256, c.d_tiles * 8);
        if (g == 0) ahead.fetch(ahead.values, start, part + 4);
        soften(scores + 512 + part * 128, w.weights[place] + 512 + part * 128, scale, s.largest, added);
      }
      if (raised) {
        s.total = _mm512_mul_ps(s.total, correction);
        for (int d = 0; d < c.d_tiles * 16; d++)
          _mm512_store_ps(s.out + d * 16, _mm512_mul_ps(_mm512_load_ps(s.out + d * 16), correction));
      }
      s.total = _mm512_add_ps(s.total, _mm512_add_ps(_mm512_add_ps(added[0], added[1]), _mm512_add_ps(added[2], added[3])));
      fence();
    }
  }
  tile_load<6>(w.weights[place ^ 1], 64);
  tile_load<7>(w.weights[place ^ 1] + 512, 64);
  for (int part = 0; part < 4; part++) value_slot(c, w.groups[groups - 1], values - tile_values, part);
}

static void attend_lanes(const Context& c, const Lanes* lanes, int num_groups, const Config& config, const Packed& out,
                         const Ahead& ahead, Buffer& buffer) {
  const size_t state_size = size_t(c.d_tiles) * 256 + size_t(c.k_steps) * 256;
  auto* memory = buffer.as<float>(state_size * kGroups + 2048 + 1024);
  Walk w;
  w.num_groups = num_groups;
  for (int place = 0; place < 2; place++) {
    w.scores[place] = memory + place * 1024;
    w.weights[place] = reinterpret_cast<bf16_t*>(memory + 2048 + place * 512);
  }
  for (int g = 0; g < num_groups; g++) {
    LaneState& s = w.groups[g];
    s.out = memory + 3072 + g * state_size;
    s.query = reinterpret_cast<bf16_t*>(s.out + c.d_tiles * 256);
    s.largest = _mm512_set1_ps(-1e30f);
    s.total = _mm512_setzero_ps();
    std::memset(s.out, 0, size_t(c.d_tiles) * 1024);
    pack_queries(lanes[g], c.k_steps, s.query);
  }
  walk_keys(c, lanes, w, config.attention_scale, ahead);
  for (int g = 0; g < num_groups; g++) {
    const LaneState& s = w.groups[g];
    __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), s.total);
    for (int d = 0; d < config.head_dim; d += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) r[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(s.out + (d + i) * 16), inverse);
      transpose16(r);
      for (int lane = 0; lane < lanes[g].count; lane++)
        store_bf16(out.at(lanes[g].row[lane], lanes[g].head[lane] * config.head_dim + d), (v16)r[lane]);
    }
  }
}
