// Attention of at most eight lanes, which is decode: one row and the query heads of one KV head. Included inside a namespace
// by vector_engine.h, for AVX-512.
//
// The same sums as attend_tile() in the same order, hence the same bits; but sixteen keys, or sixteen values of a key, fill a
// register where attend_tile() has sixteen lanes, most of which would be empty here.

static constexpr int kFewLanes = 8;

// Sixteen rows of sixteen floats, turned: out[column * kKeyTile] gets what was row r's column in its element r.
static inline void transpose_16(const float* rows, int stride, float* out) {
  __m512 a[16], b[16];
  for (int r = 0; r < 16; r++) a[r] = _mm512_loadu_ps(rows + r * stride);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4)
    for (int half = 0; half < 2; half++) {
      __m512d low = _mm512_castps_pd(b[r + half]), high = _mm512_castps_pd(b[r + half + 2]);
      a[r + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[r + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  // a[4 g + c] now holds, in its 128-bit part p, column 4 p + c of rows 4 g .. 4 g + 3.
  for (int c = 0; c < 4; c++) {
    __m512 even_01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), odd_01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    __m512 even_23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88), odd_23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_ps(out + c * kKeyTile, _mm512_shuffle_f32x4(even_01, even_23, 0x88));
    _mm512_storeu_ps(out + (4 + c) * kKeyTile, _mm512_shuffle_f32x4(odd_01, odd_23, 0x88));
    _mm512_storeu_ps(out + (8 + c) * kKeyTile, _mm512_shuffle_f32x4(even_01, even_23, 0xdd));
    _mm512_storeu_ps(out + (12 + c) * kKeyTile, _mm512_shuffle_f32x4(odd_01, odd_23, 0xdd));
  }
}

// keys [head_dim][kKeyTile], values [kKeyTile][head_dim], out [LANES][head_dim]; largest and total by lane.
template <int LANES>
static void attend_few(const Config& c, const LaneGroup& lanes, int window, int start, const float* keys, const float* values,
                       float* out, v16& largest, v16& total) {
  int hd = c.head_dim;
  v16 score[LANES][2] = {};
  for (int i = 0; i < hd; i++) {
    v16 first = load(keys + i * kKeyTile), second = load(keys + i * kKeyTile + 16);
    for (int lane = 0; lane < LANES; lane++) {
      v16 q = splat(lanes.query[lane][i]);
      score[lane][0] = fma(first, q, score[lane][0]);
      score[lane][1] = fma(second, q, score[lane][1]);
    }
  }
  const i16 count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  v16 scale = splat(c.attention_scale * 1.44269504f), peak = largest;
  for (int lane = 0; lane < LANES; lane++) {
    int position = lanes.position[lane];
    for (int half = 0; half < 2; half++) {
      i16 key = count + (start + half * 16), visible = key <= position;
      if (window) visible &= position - window < key;
      score[lane][half] = visible ? score[lane][half] * scale : splat(-__builtin_inff());
    }
    float found = _mm512_reduce_max_ps((__m512)vmax(score[lane][0], score[lane][1]));
    peak[lane] = found > peak[lane] ? found : peak[lane];
  }
  v16 correction = exp2v(largest - peak), added = {};
  largest = peak;
  alignas(64) float weight[LANES][kKeyTile];
  for (int lane = 0; lane < LANES; lane++) {
    v16 highest = splat(peak[lane]);
    store(weight[lane], exp2v(score[lane][0] - highest));
    store(weight[lane] + 16, exp2v(score[lane][1] - highest));
    float sum = 0;
    for (int t = 0; t < kKeyTile; t++) sum += weight[lane][t];
    added[lane] = sum;
  }
  total = fma(total, correction, added);
  for (int i = 0; i < hd; i += 16) {
    v16 acc[LANES];
    for (int lane = 0; lane < LANES; lane++) acc[lane] = load(out + lane * hd + i) * splat(correction[lane]);
    for (int t = 0; t < kKeyTile; t++) {
      v16 value = load(values + t * hd + i);
      for (int lane = 0; lane < LANES; lane++) acc[lane] = fma(value, splat(weight[lane][t]), acc[lane]);
    }
    for (int lane = 0; lane < LANES; lane++) store(out + lane * hd + i, acc[lane]);
  }
}

template <int LANES>
static void attend_so_many(Model& model, const Step& step, int layer, int seq, int kv_head, const LaneGroup& lanes, int limit,
                           ThreadScratch& scratch) {
  const Config& c = model.config;
  int hd = c.head_dim, window = model.layers[layer].window;
  auto* keys = scratch.keys.as<float>(size_t(kKeyTile) * hd * 2);
  auto* turned = keys + kKeyTile * hd;
  auto* values = scratch.values.as<float>(size_t(kKeyTile) * hd);
  auto* out = scratch.lanes.as<float>(size_t(hd) * 32);
  std::memset(out, 0, size_t(LANES) * hd * 4);
  v16 largest = splat(-1e30f), total = {};
  for (int start = first_tile(lanes.position[0], window); start <= lanes.last; start += kKeyTile) {
    stage_keys(model, step, layer, seq, kv_head, start, limit, keys, values);
    for (int t = 0; t < kKeyTile; t += 16)
      for (int i = 0; i < hd; i += 16) transpose_16(keys + t * hd + i, hd, turned + i * kKeyTile + t);
    attend_few<LANES>(c, lanes, window, start, turned, values, out, largest, total);
  }
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < hd; i++) lanes.out[lane][i] = out[lane * hd + i] / total[lane];
}

static void attend_few_lanes(Model& model, const Step& step, int layer, int seq, int kv_head, const LaneGroup& lanes, int limit,
                             ThreadScratch& scratch) {
  switch (lanes.count) {
    case 1: return attend_so_many<1>(model, step, layer, seq, kv_head, lanes, limit, scratch);
    case 2: return attend_so_many<2>(model, step, layer, seq, kv_head, lanes, limit, scratch);
    case 3: return attend_so_many<3>(model, step, layer, seq, kv_head, lanes, limit, scratch);
    case 4: return attend_so_many<4>(model, step, layer, seq, kv_head, lanes, limit, scratch);
    case 5: return attend_so_many<5>(model, step, layer, seq, kv_head, lanes, limit, scratch);
    case 6: return attend_so_many<6>(model, step, layer, seq, kv_head, lanes, limit, scratch);
    case 7: return attend_so_many<7>(model, step, layer, seq, kv_head, lanes, limit, scratch);
    default: return attend_so_many<8>(model, step, layer, seq, kv_head, lanes, limit, scratch);
  }
}
