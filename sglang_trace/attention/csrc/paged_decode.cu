// Decode attention over a paged NVFP4 KV cache, for Hopper (sm_90).
//
// One query token a request attends to all keys of the request. Keys and values are E2M1 codes with
// an E4M3 scale for every 16 of them; they are expanded to FP16 in registers, where code x scale is
// exact, and multiplied by the tensor cores. What limits such a kernel is the expansion, so it is
// done once per element, on the operand as the MMA wants it:
//
//   S^T[token, head] = K[token, d] Q^T[d, head]       K is the A operand (16 tokens a tile)
//   O^T[d, head]    += V^T[d, token] P^T[token, head]  V^T is the A operand (16 of D a tile)
//
// With the query heads of one KV head as the N of the MMA, no row of a tile is padding for 8 or 16
// heads a group. The order of d inside an MMA step is free, as long as both operands use the same,
// so every thread reads its share of a row as one vector and Q and O are permuted instead.
//
// Work: the tiles of all requests form one list, which is cut into equal pieces, one for each CTA
// (stream-K). A CTA's share of a request is a partial result with its own reference and sum in the
// slot `cta + request`, which no two shares have in common; `merge` adds them up.
//
// Legend: B requests, H KV heads, HQ query heads, D head size, T tokens of a tile, G CTAs.

#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=, -DHEADS=, -DGROUP=, -DSUB_TILES=, -DSTAGES=, -DCTAS_PER_SM="
#endif

namespace {

constexpr int D = HEAD_DIM;          // 64, 128 or 256
constexpr int HB = HEADS;            // KV heads of a CTA: 1, 2, 4 or 8
constexpr int GQ = GROUP;            // query heads of a KV head, 1 to 16
constexpr int NT = (GQ + 7) / 8;     // n8 tiles of query heads
constexpr int SUB = SUB_TILES;       // 16-token tiles of a warp in a stage
constexpr int kStages = STAGES;
constexpr int kAhead = STAGES > 2 ? STAGES - 2 : 1;  // tiles in flight when one is worked on
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kTeam = 8;                  // threads of `merge` that read a partial result together
constexpr int kShares = kWarps / HB;      // warps that share a head, each with tokens of its own
constexpr int kUnits = kShares * SUB;     // 16-token units of a tile
constexpr int T = kUnits * 16;
constexpr int kRow = D / 2;               // bytes of the codes of a token and head
constexpr int kScaleRow = D / 16;         // bytes of its scales
constexpr int kScaleToken = HB * kScaleRow;
constexpr int kCodes = T * HB * kRow;     // bytes of K codes, and of V codes, in a stage
constexpr int kScales = T * kScaleToken;
constexpr int kStage = 2 * (kCodes + kScales);
constexpr int kKeyWords = D / 32;         // 8-code words of a key row that one thread expands
constexpr int kValueWords = D / 64;       // and of a value row

// A code as E4M3 is value x 2^-6 (its bits moved in place); times an E4M3 scale it is exact in FP16.
constexpr float kOperandScale = 64.f;
// Probabilities are 2^(score - reference + 6), and the reference follows the largest score only when
// that is 2^9 ahead: FP16 then neither overflows nor loses what is above 2^-30 of the largest.
constexpr float kProbabilityShift = 6.f;
constexpr float kLargestExponent = 15.f;
constexpr float kNoReference = -1e30f;

struct Request {
  int number;   // of the batch
  int first;    // its first tile in the list of all
  int end;      // the tile behind its last
  int length;   // keys
  const int* pages;
};

struct Arguments {
  const __nv_bfloat16* q;         // [B, HQ, D]
  const uint8_t* k_codes;         // [slots, H, D / 2]
  const uint8_t* k_scales;        // [slots, H, D / 16]
  const uint8_t* v_codes;
  const uint8_t* v_scales;
  const int* table;               // [R, table_stride] page numbers
  const void* rows;               // [B] row of the table, int32 or int64
  const void* lengths;            // [B] keys, int32 or int64
  float* partial;                 // [slots, shares, HQ, D], unnormalised
  float* sums;                    // [slots, shares, HQ, 2]: reference (log2) and sum
  int* starts;                    // [B + 1] first tile of each request
  __nv_bfloat16* out;             // [B, HQ, D]
  long long table_stride;
  long long q_stride;             // elements between requests
  long long out_stride;
  int batch;
  int kv_heads;
  int page_shift;
  int rows_are_long;
  int lengths_are_long;
  int ctas;
  int merge_warps;
  float score_scale;              // softmax scale x K's global scale x log2(e)
  float value_scale;              // V's global scale
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies BYTES to shared memory, or zeros if not `live`.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool live) {
  const int bytes = live ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
  }
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Arrives once this thread's copies so far have been written.
__device__ __forceinline__ void barrier_arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// Hides where a value comes from, so that it stays in a register instead of being computed again.
template <class V>
__device__ __forceinline__ void keep(V& value) {
  if constexpr (sizeof(V) == 8) asm volatile("" : "+l"(value)); else asm volatile("" : "+r"(value));
}

// Every nibble's sign. From constant memory, because the assembler knows a literal's bits and would
// undo `choose` below.
__constant__ uint32_t sign_bits = 0x88888888;

// Bits of `a` where the mask is set, of `b` elsewhere, in one instruction.
__device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t chosen;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(chosen) : "r"(a), "r"(b), "r"(mask));
  return chosen;
}

// The eight codes of a word as pairs of FP16, times 2^-6, by way of E4M3 bytes: sign to bit 7, the
// rest to 4..2. Pairs are codes (0, 2), (1, 3), (4, 6) and (5, 7).
__device__ __forceinline__ void expand(uint32_t word, uint32_t (&pair)[4]) {
  constexpr uint32_t kRest = 0x1c1c1c1c;
  // The other nibble's sign is at bit 3 of a byte, where the rest goes.
  const uint32_t signs = word & sign_bits;
  const uint32_t even = choose(kRest, word << 2, signs << 4);
  const uint32_t odd = choose(kRest, word >> 2, signs);
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(pair[0]), "=r"(pair[2]) : "r"(even));
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(pair[1]), "=r"(pair[3]) : "r"(odd));
}
// First code of pair i; the second is two further on.
__device__ __forceinline__ constexpr int first_code(int pair) { return pair + pair / 2 * 2; }

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Two E4M3 scales as a pair of FP16.
__device__ __forceinline__ uint32_t scale_pair(uint32_t two_bytes) {
  uint32_t pair;
  asm("{ .reg .b16 low; cvt.u16.u32 low, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(pair) : "r"(two_bytes));
  return pair;
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t transpose(uint32_t a) {
  uint32_t b;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
  return b;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ int integer_at(const void* numbers, int is_long, int i) {
  return is_long ? static_cast<int>(static_cast<const long long*>(numbers)[i])
                 : static_cast<const int*>(numbers)[i];
}

// First tile of every request into shared memory: an exclusive sum over the batch.
__device__ void count_tiles(const Arguments& args, int* starts, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int carried = 0;
  for (int begin = 0; begin < args.batch; begin += kThreads) {
    const int i = begin + threadIdx.x;
    int sum = i < args.batch ? (integer_at(args.lengths, args.lengths_are_long, i) + T - 1) / T : 0;
    const int own = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) sum += carried + total;
      total += warp_sums[w];
    }
    if (i < args.batch) starts[i] = sum - own;
    carried += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) starts[args.batch] = carried;
  __syncthreads();
}

// The request that a tile belongs to.
__device__ __forceinline__ Request request_of(const Arguments& args, const int* starts, int tile) {
  int low = 0, high = args.batch;  // starts[low] <= tile < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= tile) low = middle; else high = middle;
  }
  Request request;
  request.number = low;
  request.first = starts[low];
  request.end = starts[low + 1];
  request.length = integer_at(args.lengths, args.lengths_are_long, low);
  request.pages = args.table + args.table_stride * integer_at(args.rows, args.rows_are_long, low);
  return request;
}

// Key rows lie in the order in which the MMA counts them: thread t of a quad has rows 2t, 2t + 1,
// 2t + 8 and 2t + 9 of P^T, which are its tokens t, t + 4, t + 8 and t + 12.
__device__ __forceinline__ constexpr int key_row(int token) {
  return 2 * (token & 3) + ((token >> 2) & 1) + 8 * (token >> 3);
}
__device__ __forceinline__ constexpr int token_of_row(int row) {
  return ((row & 7) >> 1) + 4 * (row & 1) + 8 * (row >> 3);
}
// 16-byte chunks of a row are exchanged so that a warp's reads meet every bank once.
__device__ __forceinline__ constexpr int key_chunk(int chunk, int row) {
  return D == 256 ? chunk ^ ((row & 1) << 2) : chunk;
}
__device__ __forceinline__ constexpr int value_chunk(int chunk, int token) {
  return D == 256 ? chunk ^ ((token & 3) << 1) : D == 128 ? chunk ^ (token & 2) : chunk;
}

// Which bytes of a tile a thread copies, and from which slots. The threads that copy a token's codes
// copy its scales too, so that each looks up the slots of kTurns tokens only.
struct Loader {
  static constexpr int kChunks = kRow / 16;                       // of a token and head
  static constexpr int kTokenThreads = HB * kChunks;              // one for each chunk of a token
  static constexpr int kTurnTokens = kThreads / kTokenThreads;
  static constexpr int kTurns = T / kTurnTokens;
  static constexpr int kPiece = kScaleToken < 16 ? kScaleToken : 16;
  static constexpr int kTokenPieces = 2 * kScaleToken / kPiece;   // of keys and values
  static constexpr int kPieces = kTurns * kTokenPieces;           // shared by kTokenThreads
  static constexpr int kScaleTurns = (kPieces + kTokenThreads - 1) / kTokenThreads;
  static_assert(kThreads % kTokenThreads == 0 && T % kTurnTokens == 0);
  static_assert((kTurnTokens & (kTurnTokens - 1)) == 0, "a token's bits are its thread's and its turn's");

  const uint8_t* k_codes;               // this thread's chunk in slot 0
  const uint8_t* v_codes;
  const uint8_t* scales[kScaleTurns];   // its pieces of scales in slot 0
  uint32_t k_to, v_to;                  // where the chunk of its first token goes in a stage
  uint32_t scale_to[kScaleTurns];
  int scale_turn[kScaleTurns];          // which of its tokens the piece belongs to
  uint32_t code_stride, scale_stride;
  int page_shift;
  int token;                            // this thread's first token of a tile
  int first;                            // the same, of the tile whose pages are found, in the request
  int page[kTurns];
  bool whole;                           // that tile has T tokens

  // Byte of a stage's codes at which a token's row begins; linear in the bits of `token`.
  static __device__ __forceinline__ constexpr int row_at(int token, bool keys) {
    return (token / 16 * 16 + (keys ? key_row(token % 16) : token % 16)) * kRow;
  }

  __device__ __forceinline__ Loader(const Arguments& args, int head_block) {
    const int chunk = threadIdx.x % kTokenThreads;
    token = threadIdx.x / kTokenThreads;
    keep(token);
    const int plane = chunk / kChunks * (kUnits * 16 * kRow), part = chunk % kChunks;
    k_codes = args.k_codes + head_block * (HB * kRow) + chunk * 16;
    v_codes = args.v_codes + head_block * (HB * kRow) + chunk * 16;
    k_to = plane + row_at(token, true) + key_chunk(part, key_row(token % 16)) * 16;
    v_to = kCodes + plane + row_at(token, false) + value_chunk(part, token % 16) * 16;
    code_stride = args.kv_heads * kRow;
    scale_stride = args.kv_heads * kScaleRow;
    page_shift = args.page_shift;
#pragma unroll
    for (int i = 0; i < kScaleTurns; ++i) {
      const int piece = i * kTokenThreads + chunk;
      const int turn = piece / kTokenPieces, own = piece % (kTokenPieces / 2) * kPiece;
      const bool of_values = piece % kTokenPieces >= kTokenPieces / 2;
      scale_turn[i] = turn;
      scales[i] = (of_values ? args.v_scales : args.k_scales) + head_block * kScaleToken + own;
      scale_to[i] = 2 * kCodes + of_values * kScales + (turn * kTurnTokens + token) * kScaleToken + own;
      keep(scale_turn[i]);
      keep(scale_to[i]);
      keep(scales[i]);
    }
    keep(k_codes);
    keep(v_codes);
    keep(k_to);
    keep(v_to);
  }

  // Fetch the page numbers of a tile, one tile ahead of `copy`. Nothing is done with them here: the
  // first use of a number waits for it.
  __device__ __forceinline__ void find(const Request& request, int tile) {
    const int begin = (tile - request.first) * T;
    first = begin + token;
    whole = begin + T <= request.length;
    if (whole) find_pages<true>(request); else find_pages<false>(request);
  }

  __device__ __forceinline__ void copy(uint32_t stage) const {
    if (whole) copy_slots<true>(stage); else copy_slots<false>(stage);
  }

 private:
  template <bool WHOLE>
  __device__ __forceinline__ void find_pages(const Request& request) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int position = first + turn * kTurnTokens;
      page[turn] = -1;
      if (WHOLE || position < request.length) page[turn] = __ldg(request.pages + (position >> page_shift));
    }
  }

  // The slots of this thread's tokens, -1 behind the last token.
  template <bool WHOLE>
  __device__ __forceinline__ void slots(int (&slot)[kTurns]) const {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int within = (first + turn * kTurnTokens) & ((1 << page_shift) - 1);
      slot[turn] = WHOLE || page[turn] >= 0 ? (page[turn] << page_shift) + within : -1;
    }
  }

  template <bool WHOLE>
  __device__ __forceinline__ void copy_slots(uint32_t stage) const {
    int slot[kTurns];
    slots<WHOLE>(slot);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int begin = turn * kTurnTokens;  // its bits are none of `token`
      const bool live = WHOLE || slot[turn] >= 0;
      const int from = live ? slot[turn] : 0;
      const int k_swap = key_chunk(0, key_row(begin % 16)) * 16, v_swap = value_chunk(0, begin % 16) * 16;
      copy_async<16>(stage + row_at(begin, true) + (k_to ^ k_swap), at(k_codes, from, code_stride), live);
      copy_async<16>(stage + row_at(begin, false) + (v_to ^ v_swap), at(v_codes, from, code_stride), live);
    }
#pragma unroll
    for (int i = 0; i < kScaleTurns; ++i) {
      int from = slot[0];
#pragma unroll
      for (int turn = 1; turn < kTurns; ++turn) from = select(scale_turn[i] == turn, slot[turn], from);
      const bool live = WHOLE || from >= 0;
      if (kPieces % kTokenThreads && scale_turn[i] >= kTurns) continue;
      copy_async<kPiece>(stage + scale_to[i], at(scales[i], live ? from : 0, scale_stride), live);
    }
  }

  // A choice of values: as a choice of array elements it would put the array into local memory.
  static __device__ __forceinline__ int select(bool first, int a, int b) {
    int chosen;
    asm("{ .reg .pred p; setp.ne.s32 p, %3, 0; selp.s32 %0, %1, %2, p; }"
        : "=r"(chosen) : "r"(a), "r"(b), "r"(static_cast<int>(first)));
    return chosen;
  }

  static __device__ __forceinline__ const uint8_t* at(const uint8_t* base, uint32_t slot, uint32_t stride) {
    uint64_t address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(slot), "r"(stride), "l"(base));
    return reinterpret_cast<const uint8_t*>(address);
  }
};

// What a warp knows of the request that it works on. Thread (g, t) = (lane / 4, lane % 4).
struct State {
  uint32_t q[NT][2 * kKeyWords][2];   // Q^T as B operand, column g
  float output[D / 16][NT][4];        // O^T: rows g and g + 8, columns 2t and 2t + 1
  float reference[NT][2];             // of columns 2t and 2t + 1: their largest score, or a little less, in log2
  float sum[NT][2];                   // of this thread's tokens
  float factor[NT][2];                // accumulated score -> log2 of a probability
};

// d of the first code of word j in thread t's share of a key.
__device__ __forceinline__ constexpr int key_column(int word, int t) {
  constexpr int kShare = D / 4 < 32 ? D / 4 : 32;
  return word / 4 * 128 + t * kShare + word % 4 * 8;
}

// Loads Q of a request. A power of two brings every head's largest value into [2^14, 2^15), so that
// FP16 holds what BF16 held; the factor takes it out of the scores again.
__device__ __forceinline__ void begin(State& state, const Arguments& args, const Request& request, int head) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int member = n * 8 + g;
    const __nv_bfloat16* q = args.q + request.number * args.q_stride + (head * GQ + member) * D;
    float value[kKeyWords][8], largest = 0.f;
#pragma unroll
    for (int j = 0; j < kKeyWords; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        value[j][i] = member < GQ ? __bfloat162float(q[key_column(j, t) + i]) : 0.f;
        largest = fmaxf(largest, fabsf(value[j][i]));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 16);
    const float up = __uint_as_float((127 + 14 + 127 - exponent) << 23);
    const float down = __uint_as_float((exponent - 14) << 23);
#pragma unroll
    for (int j = 0; j < kKeyWords; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.q[n][2 * j + i / 2][i % 2] = pack(value[j][first_code(i)] * up, value[j][first_code(i) + 2] * up);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.factor[n][c] = __shfl_sync(~0u, down, 4 * (2 * t + c)) * (args.score_scale * kOperandScale);
      state.reference[n][c] = kNoReference;
      state.sum[n][c] = 0.f;
    }
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) state.output[m][n][c] = 0.f;
    }
  }
}

template <int WORDS>
__device__ __forceinline__ void read_words(uint32_t (&words)[WORDS], const uint8_t* from) {
  if constexpr (WORDS == 1) {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (WORDS == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x; words[1] = two.y;
  } else {
    static_assert(WORDS == 4);
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x; words[1] = four.y; words[2] = four.z; words[3] = four.w;
  }
}

// Scores of 16 tokens: S^T rows g and g + 8, columns 2t and 2t + 1, before `factor`.
__device__ __forceinline__ void score(float (&s)[NT][4], const State& state, const uint8_t* keys, const uint8_t* scales) {
  constexpr int kWords = kKeyWords < 4 ? kKeyWords : 4;  // of one read
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < NT; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
  for (int read = 0; read < kKeyWords / kWords; ++read) {
    uint32_t words[2][kWords], scale[2][(kWords + 1) / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = g + 8 * half;
      const uint8_t* codes = keys + row * kRow;
      if constexpr (kWords == 4) {
        read_words(words[half], codes + key_chunk(read * 4 + t, row) * 16);
        const uint8_t* own = scales + token_of_row(row) * kScaleToken + read * 8 + 2 * t;
        const uint32_t two = scale_pair(*reinterpret_cast<const uint16_t*>(own));
        scale[half][0] = __byte_perm(two, 0, 0x1010);
        scale[half][1] = __byte_perm(two, 0, 0x3232);
      } else {
        read_words(words[half], codes + t * 8);
        scale[half][0] = scale_pair(scales[token_of_row(row) * kScaleToken + t] * 0x101u);
      }
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      uint32_t low[4], high[4];
      expand(words[0][j], low);
      expand(words[1][j], high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = multiply(low[i], scale[0][j / 2]);
        high[i] = multiply(high[i], scale[1][j / 2]);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t a[4] = {low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint32_t(&b)[2] = state.q[n][2 * (read * kWords + j) + step];
          mma(s[n], a, b[0], b[1]);
        }
      }
    }
  }
}

// Adds P V of 16 tokens to O^T; p are P^T's B operands.
__device__ __forceinline__ void add_values(State& state, const uint32_t (&p)[NT][2], const uint8_t* values, const uint8_t* scales) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kBlocks = (kValueWords + 1) / 2;
  uint32_t words[4][kValueWords], scale[2][kBlocks];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = t + 4 * i;
    const uint8_t* row = values + token * kRow;
    constexpr int kShare = kValueWords * 4;  // bytes
    read_words(words[i], row + value_chunk(g * kShare / 16, token) * 16 + g * kShare % 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t* first = scales + (t + 8 * i) * kScaleToken + g * kScaleRow / 8;
    const uint8_t* second = first + 4 * kScaleToken;
    if constexpr (kBlocks == 2) {
      const uint32_t a = *reinterpret_cast<const uint16_t*>(first), b = *reinterpret_cast<const uint16_t*>(second);
      scale[i][0] = scale_pair(__byte_perm(a, b, 0x0040));
      scale[i][1] = scale_pair(__byte_perm(a, b, 0x0051));
    } else {
      scale[i][0] = scale_pair(*first | (static_cast<uint32_t>(*second) << 8));
    }
  }
#pragma unroll
  for (int j = 0; j < kValueWords; ++j) {
    uint32_t operand[4][4];  // rows g / g + 8 of tokens t, t + 4; then of t + 8, t + 12
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      expand(__byte_perm(words[2 * i][j], words[2 * i + 1][j], 0x5140), operand[2 * i]);
      expand(__byte_perm(words[2 * i][j], words[2 * i + 1][j], 0x7362), operand[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) a[part] = multiply(operand[part][i], scale[part / 2][j / 2]);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma(state.output[4 * j + i][n], a, p[n][0], p[n][1]);
    }
  }
}

// Moves the reference up to the largest score so far and scales what was summed below the old one.
__device__ __forceinline__ void raise(State& state, const float (&s)[SUB][NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float scale[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float largest = -INFINITY;
#pragma unroll
      for (int sub = 0; sub < SUB; ++sub) largest = fmaxf(largest, fmaxf(s[sub][n][c], s[sub][n][c + 2]));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      const float now = fmaxf(state.reference[n][c], largest * state.factor[n][c]);
      scale[c] = power_of_two(state.reference[n][c] - now);
      state.reference[n][c] = now;
      state.sum[n][c] *= scale[c];
    }
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) state.output[m][n][c] *= scale[c % 2];
    }
  }
}

// Scores to exponents of probabilities; returns the largest of this thread.
__device__ __forceinline__ float exponents(float (&e)[SUB][NT][4], const State& state, const float (&s)[SUB][NT][4]) {
  float largest = -INFINITY;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const float shift[2] = {kProbabilityShift - state.reference[n][0], kProbabilityShift - state.reference[n][1]};
#pragma unroll
    for (int sub = 0; sub < SUB; ++sub) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        e[sub][n][c] = fmaf(s[sub][n][c], state.factor[n][c % 2], shift[c % 2]);
        largest = fmaxf(largest, e[sub][n][c]);
      }
    }
  }
  return largest;
}

// One warp's tokens of a tile; `tokens` is how many of the request's keys begin at its first.
__device__ __forceinline__ void attend(State& state, const uint8_t* stage, int head, int share, int tokens) {
  const int lane = threadIdx.x % 32, g = lane / 4;
  float s[SUB][NT][4];
#pragma unroll
  for (int sub = 0; sub < SUB; ++sub) {
    const int unit = share * SUB + sub;
    score(s[sub], state, stage + (head * kUnits + unit) * 16 * kRow,
          stage + 2 * kCodes + unit * 16 * kScaleToken + head * kScaleRow);
  }
  if (tokens < 16 * SUB) {
#pragma unroll
    for (int sub = 0; sub < SUB; ++sub) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (16 * sub + token_of_row(g + 8 * (c / 2)) >= tokens) s[sub][n][c] = -INFINITY;
        }
      }
    }
  }
  float e[SUB][NT][4];
  if (__any_sync(~0u, exponents(e, state, s) > kLargestExponent)) {
    raise(state, s);
    exponents(e, state, s);
  }
#pragma unroll
  for (int sub = 0; sub < SUB; ++sub) {
    uint32_t p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        e[sub][n][c] = power_of_two(e[sub][n][c]);
        state.sum[n][c % 2] += e[sub][n][c];
      }
      p[n][0] = transpose(pack(e[sub][n][0], e[sub][n][1]));
      p[n][1] = transpose(pack(e[sub][n][2], e[sub][n][3]));
    }
    const int unit = share * SUB + sub;
    add_values(state, p, stage + kCodes + (head * kUnits + unit) * 16 * kRow,
               stage + 2 * kCodes + kScales + unit * 16 * kScaleToken + head * kScaleRow);
  }
}

// Writes the warp's share of a request.
__device__ __forceinline__ void finish(State& state, const Arguments& args, int slot, int share, int head) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const long long first = static_cast<long long>(slot * kShares + share) * args.kv_heads * GQ + head * GQ;
  const float scale = kOperandScale * args.value_scale;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = state.sum[n][c];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      const int member = n * 8 + 2 * t + c;
      if (member >= GQ) continue;
      if (g == 0) {
        args.sums[2 * (first + member)] = state.reference[n][c];
        args.sums[2 * (first + member) + 1] = sum;
      }
      float* out = args.partial + (first + member) * D + g * (D / 8);
#pragma unroll
      for (int j = 0; j < kValueWords; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own = c + 2 * half;
          *reinterpret_cast<float4*>(out + 8 * j + 4 * half) =
              make_float4(state.output[4 * j][n][own] * scale, state.output[4 * j + 1][n][own] * scale,
                          state.output[4 * j + 2][n][own] * scale, state.output[4 * j + 3][n][own] * scale);
        }
      }
    }
  }
}

// A place in the ring of stages, and how often it has gone round.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__global__ void __launch_bounds__(kThreads, CTAS_PER_SM) attend_tiles(const Arguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int warp_sums[kWarps];
  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  int* starts = reinterpret_cast<int*>(shared + kStages * kStage);
  count_tiles(args, starts, warp_sums);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int i = threadIdx.x; i <= args.batch; i += kThreads) args.starts[i] = starts[i];
  }
  const long long total = starts[args.batch];
  const int ctas = static_cast<int>(min(static_cast<long long>(gridDim.x), total));
  const int cta = blockIdx.x, head_block = blockIdx.y;
  if (cta >= ctas) return;
  const int first = static_cast<int>(cta * total / ctas), end = static_cast<int>((cta + 1) * total / ctas);

  const uint32_t stages = shared_address(shared);
  const uint32_t full = shared_address(barriers), empty = full + kStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, kThreads);
      barrier_init(empty + 8 * i, kWarps);
    }
  }
  __syncthreads();

  Loader loader(args, head_block);
  Request ahead = request_of(args, starts, first);
  int next = first;  // the tile whose pages `loader` holds
  loader.find(ahead, next);
  Ring filling;
  // Copies the next tile into a stage that every warp has let go of.
  const auto load_next = [&] {
    if (next >= end) return;
    if (next - first >= kStages) barrier_wait(empty + 8 * filling.stage, filling.parity ^ 1);
    loader.copy(stages + filling.stage * kStage);
    barrier_arrive_with_copies(full + 8 * filling.stage);
    filling.advance();
    if (++next < end) {
      if (next >= ahead.end) ahead = request_of(args, starts, next);
      loader.find(ahead, next);
    }
  };
  // One stage less than there are is filled ahead, so that the slowest warp may be a tile behind.
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) load_next();

  const int warp = threadIdx.x / 32, head = warp % HB, share = warp / HB;
  State state;
  Request request = request_of(args, starts, first);
  begin(state, args, request, head_block * HB + head);
  Ring reading;
#pragma unroll 1
  for (int tile = first; tile < end; ++tile) {
    if (tile >= request.end) {
      finish(state, args, cta + request.number, share, head_block * HB + head);
      request = request_of(args, starts, tile);
      begin(state, args, request, head_block * HB + head);
    }
    load_next();
    barrier_wait(full + 8 * reading.stage, reading.parity);
    const int tokens = request.length - (tile - request.first) * T - share * SUB * 16;
    attend(state, shared + reading.stage * kStage, head, share, tokens);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * reading.stage);
    reading.advance();
  }
  finish(state, args, cta + request.number, share, head_block * HB + head);
}

// A partial result: output, relative to 2^reference, and the sum of its probabilities.
struct Partial {
  float4 output;
  float reference, sum;
};

__device__ __forceinline__ void add(Partial& to, const Partial& more) {
  const float now = fmaxf(to.reference, more.reference);
  const float before = power_of_two(to.reference - now), after = power_of_two(more.reference - now);
  to.reference = now;
  to.sum = to.sum * before + more.sum * after;
  to.output.x = to.output.x * before + more.output.x * after;
  to.output.y = to.output.y * before + more.output.y * after;
  to.output.z = to.output.z * before + more.output.z * after;
  to.output.w = to.output.w * before + more.output.w * after;
}

// Adds up what the four teams of a warp hold.
__device__ __forceinline__ void add_teams(Partial& own) {
#pragma unroll
  for (int distance = kTeam; distance < 32; distance *= 2) {
    Partial other;
    other.output.x = __shfl_xor_sync(~0u, own.output.x, distance);
    other.output.y = __shfl_xor_sync(~0u, own.output.y, distance);
    other.output.z = __shfl_xor_sync(~0u, own.output.z, distance);
    other.output.w = __shfl_xor_sync(~0u, own.output.w, distance);
    other.reference = __shfl_xor_sync(~0u, own.reference, distance);
    other.sum = __shfl_xor_sync(~0u, own.sum, distance);
    add(own, other);
  }
}

// Adds up the shares of one request and query head, 4 kTeam of D a block.
__global__ void __launch_bounds__(1024) merge(const Arguments args) {
  constexpr int kAtOnce = 4;
  __shared__ Partial warps[32][kTeam];
  const int columns = 4 * (blockIdx.x % (D / 4 / kTeam) * kTeam + threadIdx.x % kTeam);
  const int head = blockIdx.x / (D / 4 / kTeam), request = blockIdx.y;
  const int team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
  cudaGridDependencySynchronize();
  const long long total = args.starts[args.batch], ctas = min(static_cast<long long>(args.ctas), total);
  const long long from = args.starts[request], to = args.starts[request + 1];
  Partial own = {make_float4(0.f, 0.f, 0.f, 0.f), kNoReference, 0.f};
  if (to > from) {
    // A CTA begins at tile cta * total / ctas: the last one that begins at or before a tile has it.
    const long long low = ((from + 1) * ctas - 1) / total, high = (to * ctas - 1) / total;
    const int begin = static_cast<int>(low + request) * kShares, end = static_cast<int>(high + request + 1) * kShares;
    for (int part = begin + team; part < end; part += kAtOnce * teams) {
      Partial read[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const long long at = min(part + i * teams, end - 1) * static_cast<long long>(args.kv_heads * GQ) + head;
        const float2 sums = reinterpret_cast<const float2*>(args.sums)[at];
        read[i].output = *reinterpret_cast<const float4*>(args.partial + at * D + columns);
        read[i].reference = sums.x;
        read[i].sum = sums.y;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (part + i * teams < end) add(own, read[i]);
      }
    }
  }
  add_teams(own);
  if (threadIdx.x % 32 < kTeam) warps[threadIdx.x / 32][threadIdx.x % kTeam] = own;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  own = {make_float4(0.f, 0.f, 0.f, 0.f), kNoReference, 0.f};
  for (int i = team; i < blockDim.x / 32; i += 32 / kTeam) add(own, warps[i][threadIdx.x % kTeam]);
  add_teams(own);
  if (threadIdx.x >= kTeam) return;
  const float scale = own.sum == 0.f ? 0.f : 1.f / own.sum;
  __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(args.out + request * args.out_stride + head * D + columns);
  out[0] = __floats2bfloat162_rn(own.output.x * scale, own.output.y * scale);
  out[1] = __floats2bfloat162_rn(own.output.z * scale, own.output.w * scale);
}

int shared_bytes(int max_batch) { return kStages * kStage + (max_batch + 1) * 4; }

}  // namespace

// What the caller's structure must measure.
extern "C" int paged_decode_argument_bytes() { return sizeof(Arguments); }

// Both return a CUDA error code, 0 if all is well.
extern "C" int paged_decode_prepare(int max_batch, int* ctas_per_sm, int* shares) {
  *shares = kShares;
  const int bytes = shared_bytes(max_batch);
  cudaError_t error = cudaFuncSetAttribute(attend_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctas_per_sm, attend_tiles, kThreads, bytes);
}

extern "C" int paged_decode(const void* arguments, int max_batch, cudaStream_t stream) {
  const Arguments* args = static_cast<const Arguments*>(arguments);
  const dim3 grid(args->ctas, args->kv_heads / HB);
  attend_tiles<<<grid, kThreads, shared_bytes(max_batch), stream>>>(*args);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  // Lets the blocks of `merge` be placed while the last CTAs are still at work.
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(args->kv_heads * GQ * (D / 4 / kTeam), args->batch);
  config.blockDim = dim3(args->merge_warps * 32);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, merge, *args);
}
