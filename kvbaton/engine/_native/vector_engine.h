// The vector engines: any weight format, any KV type, sums in float32. Included inside a namespace of its own (see
// vector_ops.h). Every sum over k runs from 0 upwards in one accumulator per output, whatever the number of rows. Activations
// are float32, but for products with bfloat16 weights where KVB_AVX512_BF16 says that pairs of those can be multiplied:
// they are rounded to bfloat16 then, as the AMX engine does.

static constexpr int kKeyTile = 32;
static constexpr int kRowBlock = 256;

// One group of a panel to float [32 k][32 columns], sixteen columns at a time; the formats are described in model.h. The
// products are the same whether a panel is unpacked whole or group by group.
static inline void unpack_bf16(const uint8_t* from, float* out) {
  for (int tile = 0; tile < 2; tile++)
    for (int pair = 0; pair < kGroup / 2; pair++) {
      i16 both = load_i16(from + tile * 1024 + pair * 64);  // k even in the low halves, k odd in the high ones
      float* to = out + pair * 2 * kPanelCols + tile * 16;
      store(to, (v16)(both << 16));
      store(to + kPanelCols, (v16)(both & int32_t(0xffff0000)));
    }
}

static inline void unpack_int8(const uint8_t* from, float* out) {
  for (int tile = 0; tile < 2; tile++) {
    v16 scale = load_half(from + tile * 32);
    for (int four = 0; four < kGroup / 4; four++) {
      i16 digits = load_i16(from + 64 + tile * 512 + four * 64);
      float* to = out + four * 4 * kPanelCols + tile * 16;
      for (int k = 0; k < 4; k++, digits >>= 8)
        store(to + k * kPanelCols, scale * __builtin_convertvector((digits & 255) - 128, v16));
    }
  }
}

static inline void unpack_int4(const uint8_t* from, float* out) {
  for (int tile = 0; tile < 2; tile++) {
    v16 scale = load_half(from + tile * 32), minimum = load_half(from + 64 + tile * 32);
    for (int four = 0; four < kGroup / 8; four++) {
      i16 digits = load_i16(from + 128 + tile * 256 + four * 64);
      float* to = out + four * 4 * kPanelCols + tile * 16;
      for (int k = 0; k < 4; k++, digits >>= 8) {
        store(to + k * kPanelCols, scale * __builtin_convertvector(digits & 15, v16) + minimum);
        store(to + (k + 16) * kPanelCols, scale * __builtin_convertvector((digits >> 4) & 15, v16) + minimum);
      }
    }
  }
}

static inline const float* float_group(const Linear& linear, const uint8_t* panel, int group, float* out) {
  switch (linear.format) {
    case kF32: return reinterpret_cast<const float*>(panel) + size_t(group) * kGroup * kPanelCols;
    case kBF16: unpack_bf16(panel + size_t(group) * kGroup * kPanelCols * 2, out); return out;
    case kInt8: unpack_int8(panel + size_t(group) * kInt8GroupBytes, out); return out;
    default: unpack_int4(panel + size_t(group) * kInt4GroupBytes, out); return out;
  }
}

// One panel as float [k padded][32]; a float panel is returned as it is.
static const float* float_panel(const Linear& linear, int index, Buffer& buffer) {
  const uint8_t* panel = linear.panel(index);
  if (linear.format == kF32) return reinterpret_cast<const float*>(panel);
  auto* out = buffer.as<float>(size_t(linear.groups) * kGroup * kPanelCols);
  for (int group = 0; group < linear.groups; group++) float_group(linear, panel, group, out + size_t(group) * kGroup * kPanelCols);
  return out;
}

enum class Epilogue { kStore, kAdd, kSilu };

struct Output {
  float* data;
  size_t stride;
  const float* bias;
  int columns;  // columns that exist; a store never passes them
};

template <Epilogue E>
static inline void finish(v16 first, v16 second, const Output& out, int row, int panel) {
  if (out.bias) {
    first += load(out.bias + panel * 32);
    second += load(out.bias + panel * 32 + 16);
  }
  if (E == Epilogue::kSilu) {
    store(out.data + row * out.stride + panel * 16, silu_times(first, second));
    return;
  }
  float* to = out.data + row * out.stride + panel * 32;
  if (E == Epilogue::kAdd) {
    store(to, load(to) + first);
    store(to + 16, load(to + 16) + second);
  } else if (panel * 32 + 32 <= out.columns) {
    store(to, first);
    store(to + 16, second);
  } else {
    float both[32];
    store(both, first);
    store(both + 16, second);
    for (int i = 0; panel * 32 + i < out.columns; i++) to[i] = both[i];
  }
}

// ``ROWS`` rows more of a product over ``k_size`` values.
template <int ROWS>
static inline void accumulate(v16 (&acc)[ROWS][2], const float* x, size_t stride, int k_size, const float* w) {
  for (int k = 0; k < k_size; k++) {
    v16 first = load(w + size_t(k) * 32), second = load(w + size_t(k) * 32 + 16);
    for (int r = 0; r < ROWS; r++) {
      v16 a = splat(x[r * stride + k]);
      acc[r][0] = fma(a, first, acc[r][0]);
      acc[r][1] = fma(a, second, acc[r][1]);
    }
  }
}

#if KVB_AVX512_BF16
constexpr bool kBF16Pairs = true;
#else
constexpr bool kBF16Pairs = false;
#endif

// The same with both sides in bfloat16, two values of k at a time: a packed panel is what the instruction takes. ``TOGETHER``:
// how many of a panel's two tiles are walked at once. A panel that comes from memory comes faster in order, one tile after
// the other; one that is in a cache already is done sooner when both tiles share an activation.
template <int ROWS, int TOGETHER>
static inline void accumulate_pairs(v16 (&acc)[ROWS][2], const uint16_t* x, size_t stride, int groups, const uint8_t* panel) {
#if KVB_AVX512_BF16
  for (int group = 0; group < groups; group++, panel += kGroup * kPanelCols * 2)
    for (int tile = 0; tile < 2; tile += TOGETHER)
      for (int pair = 0; pair < kGroup / 2; pair++) {
        v16 w[TOGETHER];
        for (int t = 0; t < TOGETHER; t++) w[t] = (v16)load_i16(panel + (tile + t) * 1024 + pair * 64);
        for (int r = 0; r < ROWS; r++) {
          int32_t both;
          std::memcpy(&both, x + r * stride + group * kGroup + pair * 2, 4);
          auto a = (__m512bh)_mm512_set1_epi32(both);
          for (int t = 0; t < TOGETHER; t++)
            acc[r][tile + t] = (v16)_mm512_dpbf16_ps((__m512)acc[r][tile + t], a, (__m512bh)w[t]);
        }
      }
#endif
}

struct Rows {
  const float* x;
  const uint16_t* rounded;  // the same in bfloat16, or null
  size_t stride;
  int first;  // row of the output
};

// Weights either as floats, or packed (``unpacked`` is null) and unpacked on the way, which is what few rows want: they
// read each weight once. With rounded rows nothing needs to be unpacked.
template <int ROWS, Epilogue E>
static void rows_times_panel(const Rows& rows, const Linear& linear, const float* unpacked, const Output& out, int panel) {
  v16 acc[ROWS][2] = {};
  if (rows.rounded) {
    if (rows.first == 0)  // from memory
      accumulate_pairs<ROWS, 1>(acc, rows.rounded, rows.stride, linear.groups, linear.panel(panel));
    else
      accumulate_pairs<ROWS, 2>(acc, rows.rounded, rows.stride, linear.groups, linear.panel(panel));
  } else if (unpacked) {
    accumulate<ROWS>(acc, rows.x, rows.stride, linear.groups * kGroup, unpacked);
  } else {
    alignas(64) float floats[kGroup * kPanelCols];
    for (int group = 0; group < linear.groups; group++) {
      const float* w = float_group(linear, linear.panel(panel), group, floats);
      accumulate<ROWS>(acc, rows.x + group * kGroup, rows.stride, kGroup, w);
    }
  }
  for (int r = 0; r < ROWS; r++) finish<E>(acc[r][0], acc[r][1], out, rows.first + r, panel);
}

constexpr int kMostRows = 8;

template <Epilogue E>
static void up_to_eight_rows(int count, const Rows& rows, const Linear& linear, const float* unpacked, const Output& out,
                             int panel) {
  switch (count) {
    case 1: return rows_times_panel<1, E>(rows, linear, unpacked, out, panel);
    case 2: return rows_times_panel<2, E>(rows, linear, unpacked, out, panel);
    case 3: return rows_times_panel<3, E>(rows, linear, unpacked, out, panel);
    case 4: return rows_times_panel<4, E>(rows, linear, unpacked, out, panel);
    case 5: return rows_times_panel<5, E>(rows, linear, unpacked, out, panel);
    case 6: return rows_times_panel<6, E>(rows, linear, unpacked, out, panel);
    case 7: return rows_times_panel<7, E>(rows, linear, unpacked, out, panel);
    default: return rows_times_panel<8, E>(rows, linear, unpacked, out, panel);
  }
}

static const uint16_t* rounded_rows(Model& model, const float* x, size_t stride, int rows) {
  auto* out = model.digits.as<uint16_t>(rows * stride);
  for (size_t i = 0; i < rows * stride; i += 16) *reinterpret_cast<h16_unaligned*>(out + i) = to_bf16(load(x + i));
  return out;
}

template <Epilogue E>
static void product(Model& model, const float* x, size_t stride, int rows, const Linear& linear, Output out) {
  out.bias = linear.bias;
  const uint16_t* rounded = kBF16Pairs && linear.format == kBF16 ? rounded_rows(model, x, stride, rows) : nullptr;
  bool unpack = !rounded && rows > kMostRows;
  model.pool->run(linear.panels, [&](int panel, int thread) {
    const float* unpacked = unpack ? float_panel(linear, panel, model.scratch[thread].panel) : nullptr;
    for (int row = 0; row < rows; row += kMostRows) {
      size_t offset = row * stride;
      Rows some{x + offset, rounded ? rounded + offset : nullptr, stride, row};
      up_to_eight_rows<E>(std::min(kMostRows, rows - row), some, linear, unpacked, out, panel);
    }
  });
}

static void norm_rows(Model& model, const float* residual, const float* weight, float* out, int rows) {
  int width = model.hidden_padded();
  for (int row = 0; row < rows; row++) {
    const float* x = residual + size_t(row) * width;
    v16 factor = splat(rms_factor(x, width, model.config.hidden, model.config.eps));
    for (int i = 0; i < width; i += 16) store(out + size_t(row) * width + i, load(x + i) * factor * load(weight + i));
  }
}

// Sixteen lanes are (row, head) pairs that share a KV head. Keys are walked in tiles that start at multiples of kKeyTile
// whatever the chunk or block; a tile that lies behind a lane's position multiplies its state by exactly 1 and adds 0.
struct LaneGroup {
  int position[16];
  const float* query[16];
  float* out[16];
  int count, last;
};

static void stage_keys(Model& model, const Step& step, int layer, int seq, int kv_head, int start, int limit, float* keys,
                       float* values) {
  const Config& c = model.config;
  size_t itemsize = model.kv_itemsize();
  for (int t = 0; t < kKeyTile; t++) {
    float *key = keys + t * c.head_dim, *value = values + t * c.head_dim;
    if (start + t >= limit) {
      std::memset(key, 0, size_t(c.head_dim) * 4);
      std::memset(value, 0, size_t(c.head_dim) * 4);
      continue;
    }
    const uint8_t* key_slot = model.kv_slot(step, layer, seq, start + t, 0, kv_head);
    const uint8_t* value_slot = model.kv_slot(step, layer, seq, start + t, 1, kv_head);
    for (int i = 0; i < c.head_dim; i += 16) {
      store(key + i, load_kv(key_slot + i * itemsize, c.kv_type));
      store(value + i, load_kv(value_slot + i * itemsize, c.kv_type));
    }
  }
}

// Where the first tile begins that some key at or behind ``position``'s window lies in.
static int first_tile(int position, int window) {
  return window && position >= window ? (position - window + 1) / kKeyTile * kKeyTile : 0;
}

static void attend_tile(const Config& c, const LaneGroup& lanes, int window, int start, const float* keys, const float* values,
                        const v16* q, v16* out, v16& largest, v16& total) {
  int hd = c.head_dim;
  v16 score[kKeyTile];
  for (int t = 0; t < kKeyTile; t += 8) {
    v16 acc[8] = {};
    for (int i = 0; i < hd; i++)
      for (int u = 0; u < 8; u++) acc[u] = fma(splat(keys[(t + u) * hd + i]), q[i], acc[u]);
    for (int u = 0; u < 8; u++) score[t + u] = acc[u];
  }
  i16 position;
  std::memcpy(&position, lanes.position, 64);
  v16 scale = splat(c.attention_scale * 1.44269504f), peak = largest;
  for (int t = 0; t < kKeyTile; t++) {
    i16 visible = position >= start + t;
    if (window) visible &= position - window < start + t;
    score[t] = visible ? score[t] * scale : splat(-__builtin_inff());
    peak = vmax(peak, score[t]);
  }
  v16 correction = exp2v(largest - peak);
  largest = peak;
  v16 added = {};
  for (int t = 0; t < kKeyTile; t++) {
    score[t] = exp2v(score[t] - peak);
    added += score[t];
  }
  total = fma(total, correction, added);
  for (int i = 0; i < hd; i += 8) {
    v16 acc[8];
    for (int u = 0; u < 8; u++) acc[u] = out[i + u] * correction;
    for (int t = 0; t < kKeyTile; t++)
      for (int u = 0; u < 8; u++) acc[u] = fma(splat(values[t * hd + i + u]), score[t], acc[u]);
    for (int u = 0; u < 8; u++) out[i + u] = acc[u];
  }
}

static void attend_lanes(Model& model, const Step& step, int layer, int seq, int kv_head, const LaneGroup& lanes, int limit,
                         ThreadScratch& scratch) {
  const Config& c = model.config;
  int hd = c.head_dim, window = model.layers[layer].window;
  auto* keys = scratch.keys.as<float>(size_t(kKeyTile) * hd);
  auto* values = scratch.values.as<float>(size_t(kKeyTile) * hd);
  auto* q = scratch.lanes.as<v16>(size_t(hd) * 2);
  v16* out = q + hd;
  for (int i = 0; i < hd; i++) {
    out[i] = v16{};
    for (int lane = 0; lane < 16; lane++) q[i][lane] = lane < lanes.count ? lanes.query[lane][i] : 0.0f;
  }
  v16 largest = splat(-1e30f), total = {};
  for (int start = first_tile(lanes.position[0], window); start <= lanes.last; start += kKeyTile) {
    stage_keys(model, step, layer, seq, kv_head, start, limit, keys, values);
    attend_tile(c, lanes, window, start, keys, values, q, out, largest, total);
  }
  for (int lane = 0; lane < lanes.count; lane++)
    for (int i = 0; i < hd; i++) lanes.out[lane][i] = out[i][lane] / total[lane];
}

#if KVB_AVX512
#include "vector_few_lanes.h"
#else
static constexpr int kFewLanes = 0;
static void attend_few_lanes(Model&, const Step&, int, int, int, const LaneGroup&, int, ThreadScratch&) {}
#endif

static void attend(Model& model, const Step& step, int layer, int begin, int end, const float* qkv, int qkv_stride, float* out,
                   int out_stride) {
  const Config& c = model.config;
  auto segments = segments_of(step, begin, end);
  int group = model.group_heads(), hd = c.head_dim;
  model.pool->run(int(segments.size()) * c.num_kv_heads, [&](int task, int thread) {
    const Segment& s = segments[task / c.num_kv_heads];
    int kv_head = task % c.num_kv_heads, pairs = (s.end - s.begin) * group;
    int limit = step.positions[s.end - 1] + 1;
    for (int base = 0; base < pairs; base += 16) {
      LaneGroup lanes;
      lanes.count = std::min(16, pairs - base);
      for (int lane = 0; lane < 16; lane++) {
        int pair = base + std::min(lane, lanes.count - 1), row = s.begin + pair / group;
        int head = kv_head * group + pair % group;
        lanes.position[lane] = step.positions[row];
        lanes.query[lane] = qkv + size_t(row - begin) * qkv_stride + head * hd;
        lanes.out[lane] = out + size_t(row - begin) * out_stride + head * hd;
      }
      lanes.last = lanes.position[15];
      void (*attend_group)(Model&, const Step&, int, int, int, const LaneGroup&, int, ThreadScratch&) =
          lanes.count <= kFewLanes ? attend_few_lanes : attend_lanes;
      attend_group(model, step, layer, s.seq, kv_head, lanes, limit, model.scratch[thread]);
    }
  });
}

static void run_layer(Model& model, const Step& step, int layer) {
  Layer& w = model.layers[layer];
  int width = model.hidden_padded();
  int qkv_stride = w.qkv.panels * 32, out_stride = w.o.groups * kGroup, act_stride = w.down.groups * kGroup;
  auto* normed = model.normed.as<float>(size_t(kRowBlock) * width);
  auto* qkv = model.qkv.as<float>(size_t(kRowBlock) * qkv_stride);
  auto* attended = model.attended.as<float>(size_t(kRowBlock) * out_stride);
  auto* gated = model.gated.as<float>(size_t(kRowBlock) * act_stride);
  for (int begin = 0; begin < step.num_rows; begin += kRowBlock) {
    int end = std::min(step.num_rows, begin + kRowBlock), rows = end - begin;
    float* residual = static_cast<float*>(model.residual.data) + size_t(begin) * width;
    norm_rows(model, residual, w.input_norm, normed, rows);
    product<Epilogue::kStore>(model, normed, width, rows, w.qkv, {qkv, size_t(qkv_stride), nullptr, qkv_stride});
    finish_qkv(model, step, layer, begin, end, qkv, qkv_stride);
    attend(model, step, layer, begin, end, qkv, qkv_stride, attended, out_stride);
    product<Epilogue::kAdd>(model, attended, out_stride, rows, w.o, {residual, size_t(width), nullptr, width});
    norm_rows(model, residual, w.post_norm, normed, rows);
    product<Epilogue::kSilu>(model, normed, width, rows, w.gate_up, {gated, size_t(act_stride), nullptr, act_stride});
    product<Epilogue::kAdd>(model, gated, act_stride, rows, w.down, {residual, size_t(width), nullptr, width});
  }
}

static void logits(Model& model, const Step& step) {
  int width = model.hidden_padded(), rows = step.num_samples;
  auto* normed = model.normed.as<float>(size_t(std::max(rows, kRowBlock)) * width);
  const auto* residual = static_cast<const float*>(model.residual.data);
  for (int i = 0; i < rows; i++)
    norm_rows(model, residual + size_t(step.sample_rows[i]) * width, model.final_norm, normed + size_t(i) * width, 1);
  product<Epilogue::kStore>(model, normed, width, rows, model.head,
                            {step.logits, size_t(model.config.vocab), nullptr, model.config.vocab});
}

static void products(Model& model, int num_rows) {
  int width = model.hidden_padded();
  auto* residual = model.residual.as<float>(size_t(round_up(num_rows, 32)) * width);
  for (Layer& w : model.layers) {
    size_t qkv_stride = w.qkv.panels * 32, out_stride = w.o.groups * kGroup, act_stride = w.down.groups * kGroup;
    auto* normed = model.normed.as<float>(size_t(kRowBlock) * width);
    auto* qkv = model.qkv.as<float>(kRowBlock * qkv_stride);
    auto* attended = model.attended.as<float>(kRowBlock * out_stride);
    auto* gated = model.gated.as<float>(kRowBlock * act_stride);
    for (int begin = 0; begin < num_rows; begin += kRowBlock) {
      int rows = std::min(num_rows - begin, kRowBlock);
      Output add{residual + size_t(begin) * width, size_t(width), nullptr, width};
      product<Epilogue::kStore>(model, normed, width, rows, w.qkv, {qkv, qkv_stride, nullptr, int(qkv_stride)});
      product<Epilogue::kAdd>(model, attended, out_stride, rows, w.o, add);
      product<Epilogue::kSilu>(model, normed, width, rows, w.gate_up, {gated, act_stride, nullptr, int(act_stride)});
      product<Epilogue::kAdd>(model, gated, act_stride, rows, w.down, add);
    }
  }
}

static const Engine kEngine = {run_layer, logits, products};
