// Decode attention over a paged KV pool, read in place. Portable C++: the compiler vectorises the
// inner loops for the machine it runs on. Built and called by cpu_kernels.py, which also says why.
//
// pools   [num_blocks + 1, kv_heads, block_tokens, dim]   contiguous
// q       [rows, heads, key_dim]          any row and head stride, unit stride inside a head
// k, v    [tokens, kv_heads, dim]         likewise
// out     [rows, heads, value_dim]        contiguous
// tables  [rows, max_blocks] int32, lengths [rows] int32 (tokens that a row attends to, itself
//         included), slots [tokens] int64 = block * block_tokens + offset.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

template <typename T>
void write_rows(const at::Tensor& source, at::Tensor& pool, const int64_t* slots) {
  const int64_t tokens = source.size(0), heads = source.size(1), dim = source.size(2);
  const int64_t block_tokens = pool.size(2);
  const int64_t token_stride = source.stride(0), head_stride = source.stride(1);
  const T* from = source.const_data_ptr<T>();
  T* to = pool.mutable_data_ptr<T>();
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t block = slots[t] / block_tokens, offset = slots[t] % block_tokens;
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(to + ((block * heads + h) * block_tokens + offset) * dim,
                  from + t * token_stride + h * head_stride, dim * sizeof(T));
  }
}

void write_kv(const at::Tensor& k, const at::Tensor& v, at::Tensor k_pool, at::Tensor v_pool,
              const at::Tensor& slots) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, k.scalar_type(), "write_kv", [&] {
    write_rows<scalar_t>(k, k_pool, slots.const_data_ptr<int64_t>());
    write_rows<scalar_t>(v, v_pool, slots.const_data_ptr<int64_t>());
  });
}

// Rows of a page as floats: the page itself, or a converted copy.
inline const float* as_floats(const float* rows, std::vector<float>&, int64_t) { return rows; }

template <typename T>
inline const float* as_floats(const T* rows, std::vector<float>& scratch, int64_t count) {
  scratch.resize(count);
  for (int64_t i = 0; i < count; ++i) scratch[i] = static_cast<float>(rows[i]);
  return scratch.data();
}

// Dimensions are walked in strips of a fixed width, so that a strip stays in registers.
constexpr int64_t kStrip = 64;

template <int64_t width>
inline float dot_strip(const float* a, const float* b, int64_t rest) {
  const int64_t n = width ? width : rest;
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

inline float dot(const float* a, const float* b, int64_t dim) {
  float sum = 0.f;
  int64_t d = 0;
  for (; d + kStrip <= dim; d += kStrip) sum += dot_strip<kStrip>(a + d, b + d, 0);
  return d < dim ? sum + dot_strip<0>(a + d, b + d, dim - d) : sum;
}

// acc[d] += sum over rows of weights[row] * rows[row][d]
template <int64_t width>
inline void add_strip(float* acc, const float* weights, const float* rows, int64_t num_rows,
                      int64_t dim, int64_t rest) {
  const int64_t n = width ? width : rest;
  float sums[kStrip];
  for (int64_t d = 0; d < n; ++d) sums[d] = acc[d];
  for (int64_t i = 0; i < num_rows; ++i) {
    const float weight = weights[i];
#pragma omp simd
    for (int64_t d = 0; d < n; ++d) sums[d] += weight * rows[i * dim + d];
  }
  for (int64_t d = 0; d < n; ++d) acc[d] = sums[d];
}

inline void add_weighted(float* acc, const float* weights, const float* rows, int64_t num_rows,
                         int64_t dim) {
  int64_t d = 0;
  for (; d + kStrip <= dim; d += kStrip)
    add_strip<kStrip>(acc + d, weights, rows + d, num_rows, dim, 0);
  if (d < dim) add_strip<0>(acc + d, weights, rows + d, num_rows, dim, dim - d);
}

struct Shape {
  int64_t kv_heads, group, key_dim, value_dim, block_tokens;
};

template <typename T>
struct Head {  // one row's query heads that share a KV head
  const T* q;
  int64_t q_stride;
  T* out;
  const T* k;
  const T* v;
  const int* table;
  int64_t kv_head, begin, end;
};

struct Scratch {
  std::vector<float> query, scores, page, acc;
};

// A page is too short for the hardware's prefetcher to get going in, and the next lies anywhere.
inline void prefetch(const void* from, int64_t bytes) {
#if defined(__GNUC__)
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(from) + at);
#endif
}

// Calls visit(rows as floats, number of rows, index of the first) for every page of the context.
template <typename T, typename Visit>
void for_pages(const T* pool, const Head<T>& head, const Shape& s, int64_t dim, Scratch& tmp,
               Visit visit) {
  const int64_t page_size = s.block_tokens * dim;
  const auto page = [&](int64_t i) {
    return pool + (head.table[i / s.block_tokens] * s.kv_heads + head.kv_head) * page_size;
  };
  for (int64_t i = head.begin; i < head.end;) {
    const int64_t offset = i % s.block_tokens;
    const int64_t count = std::min(s.block_tokens - offset, head.end - i);
    if (i + count < head.end) prefetch(page(i + count), page_size * sizeof(T));
    visit(as_floats(page(i) + offset * dim, tmp.page, count * dim), count, i - head.begin);
    i += count;
  }
}

// Turns scores into weights that sum to 1.
void softmax(float* scores, int64_t length, float softcap) {
  if (softcap > 0.f)
    for (int64_t i = 0; i < length; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
  float top = scores[0];
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < length; ++i) top = std::max(top, scores[i]);
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < length; ++i) {
    scores[i] = std::exp(scores[i] - top);
    sum += scores[i];
  }
  const float inverse = 1.f / sum;
  for (int64_t i = 0; i < length; ++i) scores[i] *= inverse;
}

// Two passes, so that softmax is exact: scores of the whole context, then the weighted values.
// Each key and value is read once for all the query heads that share it.
template <typename T>
void attend(const Head<T>& head, const Shape& s, float scale, float softcap, Scratch& tmp) {
  const int64_t length = head.end - head.begin;
  tmp.query.resize(s.group * s.key_dim);
  tmp.scores.resize(s.group * length);
  tmp.acc.assign(s.group * s.value_dim, 0.f);
  for (int64_t g = 0; g < s.group; ++g)
    for (int64_t d = 0; d < s.key_dim; ++d)
      tmp.query[g * s.key_dim + d] = static_cast<float>(head.q[g * head.q_stride + d]) * scale;

  for_pages(head.k, head, s, s.key_dim, tmp, [&](const float* keys, int64_t count, int64_t at) {
    for (int64_t g = 0; g < s.group; ++g)
      for (int64_t i = 0; i < count; ++i)
        tmp.scores[g * length + at + i] =
            dot(tmp.query.data() + g * s.key_dim, keys + i * s.key_dim, s.key_dim);
  });
  for (int64_t g = 0; g < s.group; ++g) softmax(tmp.scores.data() + g * length, length, softcap);
  for_pages(head.v, head, s, s.value_dim, tmp, [&](const float* values, int64_t count, int64_t at) {
    for (int64_t g = 0; g < s.group; ++g)
      add_weighted(tmp.acc.data() + g * s.value_dim, tmp.scores.data() + g * length + at, values,
                   count, s.value_dim);
  });
  for (int64_t d = 0; d < s.group * s.value_dim; ++d) head.out[d] = static_cast<T>(tmp.acc[d]);
}

// Waking a sleeping thread costs about as much as reading this much KV.
constexpr int64_t kWorthAThreadBytes = 1 << 20;

int64_t num_parts(const int* lengths, int64_t rows, const Shape& s, int64_t element_bytes) {
  int64_t tokens = 0;
  for (int64_t row = 0; row < rows; ++row) tokens += lengths[row];
  const int64_t bytes = tokens * s.kv_heads * (s.key_dim + s.value_dim) * element_bytes;
  return std::clamp<int64_t>(bytes / kWorthAThreadBytes, 1,
                             std::min<int64_t>(at::get_num_threads(), rows * s.kv_heads));
}

// Contexts are ragged: cut the (row, KV head) tasks where each thread gets equal KV to read.
std::vector<int64_t> equal_parts(const int* lengths, int64_t rows, int64_t kv_heads, int64_t parts) {
  std::vector<int64_t> ends(rows * kv_heads);
  int64_t total = 0;
  for (int64_t t = 0; t < rows * kv_heads; ++t) ends[t] = total += lengths[t / kv_heads] + 16;
  std::vector<int64_t> bounds(parts + 1, 0);
  for (int64_t p = 1; p <= parts; ++p)
    bounds[p] = std::upper_bound(ends.begin(), ends.end(), total * p / parts) - ends.begin();
  return bounds;
}

void decode(const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool,
            const at::Tensor& tables, const at::Tensor& lengths, at::Tensor out, double scale,
            int64_t window, double softcap) {
  const int64_t rows = q.size(0);
  const Shape shape{k_pool.size(1), q.size(1) / k_pool.size(1), k_pool.size(3), v_pool.size(3),
                    k_pool.size(2)};
  const int* table = tables.const_data_ptr<int>();
  const int* length = lengths.const_data_ptr<int>();
  const int64_t parts = num_parts(length, rows, shape, q.element_size());
  const auto bounds = equal_parts(length, rows, shape.kv_heads, parts);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, q.scalar_type(), "decode", [&] {
    const scalar_t* q_data = q.const_data_ptr<scalar_t>();
    scalar_t* out_data = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      Scratch scratch;
      for (int64_t t = bounds[first]; t < bounds[last]; ++t) {
        const int64_t row = t / shape.kv_heads, kv_head = t % shape.kv_heads, end = length[row];
        const int64_t head = kv_head * shape.group;
        attend<scalar_t>({q_data + row * q.stride(0) + head * q.stride(1), q.stride(1),
                          out_data + (row * q.size(1) + head) * shape.value_dim,
                          k_pool.const_data_ptr<scalar_t>(), v_pool.const_data_ptr<scalar_t>(),
                          table + row * tables.size(1), kv_head,
                          window > 0 ? std::max<int64_t>(0, end - window) : 0, end},
                         shape, static_cast<float>(scale), static_cast<float>(softcap), scratch);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY(chairlift, m) {
  m.def("write_kv(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots) -> ()");
  m.def(
      "decode(Tensor q, Tensor k_pool, Tensor v_pool, Tensor tables, Tensor lengths, "
      "Tensor(a!) out, float scale, int window, float softcap) -> ()");
}

TORCH_LIBRARY_IMPL(chairlift, CPU, m) {
  m.impl("write_kv", write_kv);
  m.impl("decode", decode);
}
