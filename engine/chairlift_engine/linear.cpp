// y = x W^T + b in fp32, fast from one row on. Built and called through cpu_kernels.py; what is
// packed and why is packed_linear.py's to say.
//
// Weights lie in panels of kPanel output features, [depth block][panel][depth][kPanel], so that a
// step reads them once and in order. Zero-filled where the features end. As fp32, or as bf16 where
// no weight needs more: there a lane of 32 bits holds two, one of each half of the panel.
//
// An output is always the same sum in the same order: a fused multiply-add chain within each block
// of kDepth, then the blocks one by one onto the bias. So its bits depend neither on the number of
// rows nor on how the work is cut among threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kMaxRows = 6;
#else
constexpr int kVectorBytes = 16, kMaxRows = 6;
#endif
constexpr int kLanes = kVectorBytes / 4;
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kDepth = 256;     // a panel's block and its rows stay in the first-level cache
constexpr int64_t kRowBlock = 192;  // rows whose block stays in the second-level cache
constexpr int64_t kSmallestPart = 4 * kMaxRows;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

template <typename T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline void load_weights(const float* from, Floats& low, Floats& high) {
  low = load<Floats>(from);
  high = load<Floats>(from + kLanes);
}

inline void load_weights(const uint16_t* from, Floats& low, Floats& high) {
  const Words both = load<Words>(from);  // widening bf16 is a shift
  low = (Floats)(both << 16);
  high = (Floats)(both & 0xffff0000u);
}

struct Tile {  // of the output, and what it is added to: the bias first, then itself
  float* out;
  const float* base;
  int64_t out_stride, base_stride;
};

// `rows` rows times `panels` neighbouring panels, over one depth block.
template <int rows, int panels, typename W>
void multiply(const float* x, int64_t x_stride, const W* weights, int64_t depth, Tile tile) {
  Floats sums[rows][panels][2] = {};
  const float* row[rows];
  for (int r = 0; r < rows; ++r) row[r] = x + r * x_stride;
  for (int64_t d = 0; d < depth; ++d) {
#pragma GCC unroll 16
    for (int p = 0; p < panels; ++p) {
      Floats low, high;
      load_weights(weights + (p * depth + d) * kPanel, low, high);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        sums[r][p][0] += row[r][d] * low;
        sums[r][p][1] += row[r][d] * high;
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int p = 0; p < panels; ++p)
      for (int half = 0; half < 2; ++half) {
        const int64_t column = p * kPanel + half * kLanes;
        const Floats sum = load<Floats>(tile.base + r * tile.base_stride + column) + sums[r][p][half];
        std::memcpy(tile.out + r * tile.out_stride + column, &sum, sizeof(sum));
      }
}

template <typename W>
using Multiply = void (*)(const float*, int64_t, const W*, int64_t, Tile);

// Few rows are multiplied with several panels at once: enough independent sums to hide latency.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= kMaxRows / 2 ? 2 : 1; }

template <typename W, int rows = 1>
Multiply<W> multiply_for(int64_t num_rows, bool one_panel) {
  if (num_rows == rows)
    return one_panel ? multiply<rows, 1, W> : multiply<rows, panels_at_once(rows), W>;
  if constexpr (rows < kMaxRows) return multiply_for<W, rows + 1>(num_rows, one_panel);
  return nullptr;
}

template <typename W>
struct Work {
  const float* x;
  const W* weights;
  const float* bias;  // filled up to whole panels
  float* out;
  int64_t depth, columns;
  int64_t num_panels() const { return (columns + kPanel - 1) / kPanel; }
};

// One depth block of some rows and panels.
template <typename W>
void multiply_block(const Work<W>& work, int64_t row, int64_t num_rows, int64_t panel,
                    int64_t panels, int64_t start, int64_t depth, Multiply<W> multiply) {
  const int64_t column = panel * kPanel, width = panels * kPanel;
  const float* x = work.x + row * work.depth + start;
  const W* weights =
      work.weights + start * work.num_panels() * kPanel + panel * depth * kPanel;
  float* out = work.out + row * work.columns + column;
  const float* bias = work.bias + column;
  const int64_t wanted = std::min(width, work.columns - column);
  if (wanted == width) {
    const Tile tile = start ? Tile{out, out, work.columns, work.columns}
                            : Tile{out, bias, work.columns, 0};
    return multiply(x, work.depth, weights, depth, tile);
  }
  float edge[kMaxRows * 4 * kPanel];
  for (int64_t r = 0; start && r < num_rows; ++r)
    std::memcpy(edge + r * width, out + r * work.columns, wanted * sizeof(float));
  multiply(x, work.depth, weights, depth,
           start ? Tile{edge, edge, width, width} : Tile{edge, bias, width, 0});
  for (int64_t r = 0; r < num_rows; ++r)
    std::memcpy(out + r * work.columns, edge + r * width, wanted * sizeof(float));
}

template <typename W>
void multiply_rows(const Work<W>& work, int64_t first_row, int64_t last_row, int64_t first_panel,
                   int64_t last_panel) {
  const int64_t rows = last_row - first_row;
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t stride = blocks == 1 ? panels_at_once(rows) : 1;
  for (int64_t start = 0; start < work.depth; start += kDepth) {
    const int64_t depth = std::min(kDepth, work.depth - start);
    for (int64_t panel = first_panel; panel < last_panel;) {
      const int64_t panels = panel + stride <= last_panel ? stride : 1;
      for (int64_t b = 0, row = first_row; b < blocks; ++b) {
        const int64_t end = first_row + rows * (b + 1) / blocks;
        multiply_block(work, row, end - row, panel, panels, start, depth,
                       multiply_for<W>(end - row, panels == 1));
        row = end;
      }
      panel += panels;
    }
  }
}

// Waking a sleeping thread and waiting for it was measured to cost about this much: a thread gets
// panels for at least this long, or stays asleep.
constexpr double kWorthAThreadNs = 100e3;

template <typename W>
int64_t tasks_per_thread(const Work<W>& work, int64_t rows) {
  const double weight_ns = std::max(sizeof(W) / 14., rows / 35.);  // one weight's bytes, its sums
  return 1 + static_cast<int64_t>(kWorthAThreadNs / (weight_ns * work.depth * kPanel));
}

// A task is a panel times a part of the rows: parts that fit the cache, and more of them where
// there are too few panels for the threads. Tasks of a part are neighbours, a thread takes a run.
template <typename W>
void multiply_all(const Work<W>& work, int64_t rows) {
  if (rows == 0) return;
  const int64_t panels = work.num_panels(), wanted = 2 * at::get_num_threads();
  const int64_t parts = std::max((rows + kRowBlock - 1) / kRowBlock,
                                 std::min((wanted + panels - 1) / panels, rows / kSmallestPart));
  const int64_t grain = tasks_per_thread(work, rows / parts);
  at::parallel_for(0, parts * panels, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last;) {
      const int64_t part = task / panels, panel = task % panels;
      const int64_t end = std::min(panels, panel + last - task);
      multiply_rows(work, rows * part / parts, rows * (part + 1) / parts, panel, end);
      task += end - panel;
    }
  });
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& bias,
                  int64_t columns) {
  const at::Tensor rows = x.contiguous();
  auto shape = x.sizes().vec();
  const int64_t depth = shape.back(), num_rows = x.numel() / depth;
  shape.back() = columns;
  at::Tensor out = at::empty(shape, x.options());
  const auto run = [&](auto* weights) {
    multiply_all<std::remove_const_t<std::remove_pointer_t<decltype(weights)>>>(
        {rows.const_data_ptr<float>(), weights, bias.const_data_ptr<float>(),
         out.mutable_data_ptr<float>(), depth, columns},
        num_rows);
  };
  if (packed.scalar_type() == at::kFloat)
    run(packed.const_data_ptr<float>());
  else
    run(reinterpret_cast<const uint16_t*>(packed.const_data_ptr<at::BFloat16>()));
  return out;
}

// Where column `i` of a panel lies in a row of it.
template <typename T>
int64_t place(int64_t i) {
  return sizeof(T) == 4 ? i : i % kLanes * 2 + i / kLanes;
}

template <typename T>
void pack_as(const at::Tensor& weight, at::Tensor& packed) {
  const int64_t columns = weight.size(0), full_depth = weight.size(1);
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  const float* from = weight.const_data_ptr<float>();
  T* to = packed.mutable_data_ptr<T>();
  at::parallel_for(0, panels, 1, [&](int64_t first, int64_t last) {
    for (int64_t start = 0; start < full_depth; start += kDepth) {
      const int64_t depth = std::min(kDepth, full_depth - start);
      for (int64_t panel = first; panel < last; ++panel)
        for (int64_t i = 0; i < kPanel; ++i) {
          const int64_t column = panel * kPanel + i;
          T* at = to + start * panels * kPanel + panel * depth * kPanel + place<T>(i);
          for (int64_t d = 0; d < depth; ++d)
            at[d * kPanel] = static_cast<T>(
                column < columns ? from[column * full_depth + start + d] : 0.f);
        }
    }
  });
}

// The packed weight, and the bias (0 where there is none) filled up to whole panels.
std::tuple<at::Tensor, at::Tensor> pack_linear(const at::Tensor& weight,
                                               const std::optional<at::Tensor>& bias,
                                               bool as_bf16) {
  const int64_t columns = (weight.size(0) + kPanel - 1) / kPanel * kPanel;
  at::Tensor packed = at::empty({columns * weight.size(1)},
                                weight.options().dtype(as_bf16 ? at::kBFloat16 : at::kFloat));
  at::Tensor full_bias = at::zeros({columns}, weight.options());
  if (bias) full_bias.narrow(0, 0, weight.size(0)).copy_(*bias);
  if (as_bf16)
    pack_as<at::BFloat16>(weight.contiguous(), packed);
  else
    pack_as<float>(weight.contiguous(), packed);
  return {packed, full_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(chairlift, m) {
  m.def("pack_linear(Tensor weight, Tensor? bias, bool as_bf16) -> (Tensor, Tensor)");
  m.def("linear(Tensor x, Tensor packed, Tensor bias, int columns) -> Tensor");
}

TORCH_LIBRARY_IMPL(chairlift, CPU, m) {
  m.impl("pack_linear", pack_linear);
  m.impl("linear", linear);
}
