// Who attends to what: one task for each sequence of a row block and KV head. Included inside a namespace by amx_engine.cpp.

struct Task {  // one segment and KV head
  Segment segment;
  int kv_head;
};

// queries: bf16 [rows][heads][head_dim padded to 32]
static Lanes lanes_of(const Model& model, const Step& step, const Task& task, int begin, int base, const bf16_t* queries) {
  int group = model.group_heads(), width = int(round_up(model.config.head_dim, 32));
  Lanes lanes;
  lanes.count = std::min(16, (task.segment.end - task.segment.begin) * group - base);
  for (int lane = 0; lane < 16; lane++) {
    int pair = base + std::min(lane, lanes.count - 1), row = task.segment.begin + pair / group;
    lanes.position[lane] = step.positions[row];
    lanes.row[lane] = row - begin;
    lanes.head[lane] = task.kv_head * group + pair % group;
    const bf16_t* query = queries + (size_t(row - begin) * model.config.num_heads + lanes.head[lane]) * width;
    lanes.query[lane] = lane < lanes.count ? query : nullptr;
  }
  lanes.first = lanes.position[0];
  lanes.last = lanes.position[15];
  return lanes;
}

static void attend_task(Model& model, const Step& step, int layer, const Task& task, const Task* next, int begin,
                        const bf16_t* queries, const Packed& out, ThreadScratch& scratch) {
  const Config& config = model.config;
  const Segment& segment = task.segment;
  Context c;
  c.window = model.layers[layer].window;
  c.limit = step.positions[segment.end - 1] + 1;
  int oldest = step.positions[segment.begin];
  c.first = c.window && oldest >= c.window ? (oldest - c.window + 1) / kKeyTile * kKeyTile : 0;
  c.d_tiles = (config.head_dim + 15) / 16;
  c.k_steps = int(round_up(config.head_dim, 32) / 32);
  c.values = nullptr;
  stage_keys(model, Rows(model, step, layer, segment.seq, 0, task.kv_head), c, scratch);
  Rows values(model, step, layer, segment.seq, 1, task.kv_head);
  int pairs = (segment.end - segment.begin) * model.group_heads();
  const Task& after = next && pairs <= 16 ? *next : task;
  Ahead ahead{Rows(model, step, layer, after.segment.seq, 0, after.kv_head),
              Rows(model, step, layer, after.segment.seq, 1, after.kv_head),
              &after == &task ? 0 : step.positions[after.segment.end - 1] + 1};
  if (pairs <= kFewLanes) {
    configure_few_lanes();
    attend_few(c, values, lanes_of(model, step, task, begin, 0, queries), config, out, ahead, scratch.lanes);
    configure_tiles();
    return;
  }
  c.values = scratch.values.as<bf16_t>(size_t(c.end() - c.first) * c.d_tiles * 16);
  for (int start = c.first; start < c.end(); start += kKeyTile) {
    for (int run = 0; run < 8; run++) ahead.fetch(ahead.keys, start, run);
    stage_values(model, values, start, c);
    stage_values(model, values, start + 32, c);
  }
  for (int base = 0; base < pairs;) {
    Lanes lanes[kGroups];
    int groups = 0;
    for (; groups < kGroups && base < pairs; base += 16) lanes[groups++] = lanes_of(model, step, task, begin, base, queries);
    attend_lanes(c, lanes, groups, config, out, ahead, scratch.lanes);
  }
}

static void attend(Model& model, const Step& step, int layer, int begin, int end, const bf16_t* queries, const Packed& out) {
  std::vector<Task> tasks;
  for (const Segment& segment : segments_of(step, begin, end))
    for (int head = 0; head < model.config.num_kv_heads; head++) tasks.push_back({segment, head});
  model.pool->run(int(tasks.size()), [&](int index, int thread) {
    if (thread) configure_tiles();
    const Task* next = index + 1 < int(tasks.size()) ? &tasks[index + 1] : nullptr;
    attend_task(model, step, layer, tasks[index], next, begin, queries, out, model.scratch[thread]);
  });
}
