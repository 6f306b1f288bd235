"""The CUDA C++ templates of all kernels; `kernel_sources` adds one line for each kernel that a program uses.

The text needs no header, so NVRTC compiles a kernel in a fraction of a second. Threads are independent (no shared
memory, no warps), so the tests compile the same text for the CPU. Rounding is the same everywhere: to nearest, ties to
even, and no product is fused with a sum, so two ranks that combine the same numbers get the same bits.
"""

from __future__ import annotations

TEMPLATES = r"""
#define INLINE __device__ __forceinline__

typedef long long Int64;

// ---- dtypes: an item in memory, and the type it is computed in ------------------------------------------------------

union FloatBits {
    float number;
    unsigned bits;
};

INLINE float float_of(unsigned bits) {
    FloatBits both;
    both.bits = bits;
    return both.number;
}

INLINE unsigned bits_of(float number) {
    FloatBits both;
    both.number = number;
    return both.bits;
}

template <class T>
struct Plain {
    typedef T Item;
    typedef T Wide;
    static INLINE T widen(T item) { return item; }
    static INLINE T narrow(T wide) { return wide; }
};

struct Bool {
    typedef unsigned char Item;
    typedef bool Wide;
    static INLINE bool widen(Item item) { return item != 0; }
    static INLINE Item narrow(bool wide) { return wide; }
};

struct Float16 {
    typedef unsigned short Item;
    typedef float Wide;

    static INLINE float widen(Item item) {
#ifdef __CUDACC__
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(item));
        return wide;
#else
        unsigned sign = (item & 0x8000u) << 16, rest = (item & 0x7fffu) << 13;
        if (rest >= 0x7c00u << 13) return float_of(sign | rest | 0x7f800000u);  // infinity, NaN
        return float_of(sign | bits_of(float_of(rest) * 0x1p112f));             // the exponents' biases differ by 112
#endif
    }

    static INLINE Item narrow(float wide) {
#ifdef __CUDACC__
        Item item;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(item) : "f"(wide));
        return item;
#else
        unsigned bits = bits_of(wide), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
        if (rest > 0x7f800000u) return sign | 0x7e00u | (rest >> 13 & 0x3ffu);  // NaN
        if (rest >= 0x477ff000u) return sign | 0x7c00u;                         // 65520 or more: infinity
        // Subnormal: the ulp of 0.5f is theirs, so the addition rounds as required.
        if (rest < 0x38800000u) return sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f));
        return sign | (rest + 0xfffu + (rest >> 13 & 1u) - (112u << 23)) >> 13;
#endif
    }
};

struct BFloat16 {
    typedef unsigned short Item;
    typedef float Wide;

    static INLINE float widen(Item item) { return float_of(unsigned(item) << 16); }

    static INLINE Item narrow(float wide) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        Item item;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(item) : "f"(wide));
        return item;
#else
        unsigned bits = bits_of(wide);
        // A NaN stays one even if only the bits that are cut off said so.
        if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
        return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
#endif
    }
};

template <class Real>
struct Complex {
    Real real, imaginary;
};

// ---- operations -----------------------------------------------------------------------------------------------------

template <int BYTES> struct Modular { typedef unsigned Type; };
template <> struct Modular<8> { typedef unsigned long long Type; };

// Integers wrap. A float's product must not be fused with the sum that follows.
template <class T> INLINE T product(T a, T b) {
    typedef typename Modular<sizeof(T)>::Type U;
    return T(U(a) * U(b));
}
#ifdef __CUDACC__
template <> INLINE float product(float a, float b) { return __fmul_rn(a, b); }
template <> INLINE double product(double a, double b) { return __dmul_rn(a, b); }
#else
template <> INLINE float product(float a, float b) { return a * b; }
template <> INLINE double product(double a, double b) { return a * b; }
#endif
template <class Real> INLINE Complex<Real> product(Complex<Real> a, Complex<Real> b) {
    return {product(a.real, b.real) - product(a.imaginary, b.imaginary),
            product(a.real, b.imaginary) + product(a.imaginary, b.real)};
}

template <class T> INLINE T sum(T a, T b) {
    typedef typename Modular<sizeof(T)>::Type U;
    return T(U(a) + U(b));
}
template <> INLINE float sum(float a, float b) { return a + b; }
template <> INLINE double sum(double a, double b) { return a + b; }

struct First {
    template <class T> static INLINE T combine(T a, T) { return a; }
};
struct Sum {
    template <class T> static INLINE T combine(T a, T b) { return sum(a, b); }
};
struct Product {
    template <class T> static INLINE T combine(T a, T b) { return product(a, b); }
};
struct Min {  // propagates NaN
    template <class T> static INLINE T combine(T a, T b) { return a < b || a != a ? a : b; }
};
struct Max {
    template <class T> static INLINE T combine(T a, T b) { return a > b || a != a ? a : b; }
};
struct Band {
    template <class T> static INLINE T combine(T a, T b) { return a & b; }
};
struct Bor {
    template <class T> static INLINE T combine(T a, T b) { return a | b; }
};
struct Bxor {
    template <class T> static INLINE T combine(T a, T b) { return a ^ b; }
};
struct Or {
    static INLINE bool combine(bool a, bool b) { return a | b; }
};
struct And {
    static INLINE bool combine(bool a, bool b) { return a & b; }
};

// The mean of two means, each of so many values; as `collectives.tensors.halves.averaging`, with the heavier one first.
struct Mean {
    static INLINE float combine(float a, float b, int left, int right) {
        const float first = left < right ? b : a, second = left < right ? a : b;
        const float larger = float(left < right ? right : left), all = float(left + right);
        return fmaf((all - larger) / all, second, product(larger / all, first));
    }
};

// Rounds every intermediate result to the dtype.
template <class Dtype, class Operation>
struct Stepwise {
    typedef typename Dtype::Wide Wide;
    static INLINE Wide combine(Wide a, Wide b) { return Dtype::widen(Dtype::narrow(Operation::combine(a, b))); }
};

// An operation on two values, each of which has the contributions of so many ranks.
template <class Operation>
struct Joined {
    template <class T> static INLINE T combine(T a, T b, int, int) { return Operation::combine(a, b); }
};
template <>
struct Joined<Mean> : Mean {};
template <class Dtype>
struct Joined<Stepwise<Dtype, Mean>> {
    static INLINE float combine(float a, float b, int left, int right) {
        return Dtype::widen(Dtype::narrow(Mean::combine(a, b, left, right)));
    }
};

// ---- scalings: applied in the type of the computation ---------------------------------------------------------------

struct Scaling {
    double factor;
    Int64 divisor;
};

struct Unscaled {
    template <class T> static INLINE T apply(T value, const Scaling &) { return value; }
};
struct Multiply {
    template <class T> static INLINE T apply(T value, const Scaling &by) { return product(value, T(by.factor)); }
    template <class Real> static INLINE Complex<Real> apply(Complex<Real> value, const Scaling &by) {
        return {apply(value.real, by), apply(value.imaginary, by)};
    }
};
struct Divide {
    template <class T> static INLINE T apply(T value, const Scaling &by) { return value / T(by.factor); }
};
// Integers, truncated toward zero. The divisor is a number of ranks and fits an int.
struct Quotient {
    template <class T> static INLINE T apply(T value, const Scaling &by) { return T(value / int(by.divisor)); }
    static INLINE unsigned apply(unsigned value, const Scaling &by) { return value / unsigned(by.divisor); }
    static INLINE Int64 apply(Int64 value, const Scaling &by) { return value / by.divisor; }
    static INLINE unsigned long long apply(unsigned long long value, const Scaling &by) {
        return value / (unsigned long long)by.divisor;
    }
};
// Integers and bools: the product in float64, truncated toward zero.
struct Truncate {
    template <class T> static INLINE T apply(T value, const Scaling &by) { return T(double(value) * by.factor); }
};

// ---- memory: several neighbouring items as one word of up to 16 bytes -----------------------------------------------

template <int BYTES> struct Word;
template <> struct Word<16> { struct alignas(16) Type { unsigned a, b, c, d; }; };
template <> struct Word<8> { typedef unsigned long long Type; };
template <> struct Word<4> { typedef unsigned Type; };
template <> struct Word<2> { typedef unsigned short Type; };

template <class Item, int N>
struct Group {
    union {
        typename Word<N * sizeof(Item)>::Type word;
        Item items[N];
    };
    INLINE void load(const char *address) { word = *(const typename Word<N * sizeof(Item)>::Type *)address; }
    INLINE void store(char *address) const { *(typename Word<N * sizeof(Item)>::Type *)address = word; }
};

template <class Item>
struct Group<Item, 1> {
    Item items[1];
    INLINE void load(const char *address) { items[0] = *(const Item *)address; }
    INLINE void store(char *address) const { *(Item *)address = items[0]; }
};

// ---- combine --------------------------------------------------------------------------------------------------------

struct Pointers {
    Int64 at[JOBS][2 * WAYS];  // of each job: the sources, then the targets
};

struct Shape {
    Int64 counts[JOBS];
    int sources[JOBS];
    int targets[JOBS];
    int ranks[JOBS][WAYS];  // how many ranks have contributed to each source
};

// Combine groups of N items: the first ``before`` groups lie at the beginning, the others after a gap of ``gap`` items.
// All threads of the grid's row share the groups. LIMIT is at least the number of sources. All loads of an iteration
// are issued before the first is used, and before anything is written, because a target may be a source.
template <class Dtype, class Operation, class Scale, int LIMIT, int N>
INLINE void sweep(const Int64 *at, const int *ranks, int sources, int targets, Int64 groups, Int64 before, Int64 gap,
                  const Scaling &scaling) {
    typedef typename Dtype::Item Item;
    const int UNROLL = LIMIT < 4 ? (sizeof(Item) == 1 ? 2 : 4) / LIMIT : 1;  // with more, registers are spilled
    const Int64 stride = Int64(gridDim.x) * blockDim.x;
    for (Int64 first = Int64(blockIdx.x) * blockDim.x + threadIdx.x; first < groups; first += UNROLL * stride) {
        Group<Item, N> loaded[UNROLL][LIMIT];
        Int64 offset[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Int64 i = first + u * stride;
            offset[u] = (i * N + (i < before ? 0 : gap)) * Int64(sizeof(Item));
        }
#pragma unroll
        for (int s = 0; s < LIMIT; ++s)
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (s < sources && first + u * stride < groups) loaded[u][s].load((const char *)at[s] + offset[u]);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
            for (int n = 0; n < N; ++n) {  // the fixed tree: neighbours, then neighbouring pairs, then fours
                typename Dtype::Wide values[LIMIT];
                int in[LIMIT];
#pragma unroll
                for (int s = 0; s < LIMIT; ++s)
                    if (s < sources) values[s] = Dtype::widen(loaded[u][s].items[n]), in[s] = ranks[s];
#pragma unroll
                for (int step = 1; step < LIMIT; step *= 2)
#pragma unroll
                    for (int s = 0; s + step < LIMIT; s += 2 * step)
                        if (s + step < sources) {
                            values[s] = Joined<Operation>::combine(values[s], values[s + step], in[s], in[s + step]);
                            in[s] += in[s + step];
                        }
                loaded[u][0].items[n] = Dtype::narrow(Scale::apply(values[0], scaling));
            }
        }
#pragma unroll 1
        for (int t = 0; t < targets; ++t)
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (first + u * stride < groups) loaded[u][0].store((char *)at[WAYS + t] + offset[u]);
    }
}

// One job, in 16-byte words where all pointers are aligned alike; items before the first word and after the last are
// handled one by one. Single-byte items of more than two sources use 8-byte words, because 16 items of each source,
// widened, would not fit the registers.
template <class Dtype, class Operation, class Scale, int LIMIT>
INLINE void combine_job(const Int64 *at, const int *ranks, int sources, int targets, Int64 count,
                        const Scaling &scaling) {
    const int SIZE = sizeof(typename Dtype::Item), N = SIZE == 1 && LIMIT > 2 ? 8 : 16 / SIZE;
    Int64 differences = 0;
#pragma unroll
    for (int s = 1; s < LIMIT; ++s)
        if (s < sources) differences |= at[s] ^ at[0];
    for (int t = 0; t < targets; ++t) differences |= at[WAYS + t] ^ at[0];
    const int to_word = int(-at[0] & 15);
    Int64 head = 0, words = 0;
    if (N > 1 && (differences & 15) == 0 && to_word % SIZE == 0 && count > to_word / SIZE) {
        head = to_word / SIZE;
        words = (count - head) / N;
    }
    if (N > 1) sweep<Dtype, Operation, Scale, LIMIT, N>(at, ranks, sources, targets, words, 0, head, scaling);
    sweep<Dtype, Operation, Scale, LIMIT, 1>(at, ranks, sources, targets, count - words * N, head, words * N, scaling);
}

template <class Dtype, class Operation, class Scale>
INLINE void combine(const Int64 *at, const Shape &shape, const Scaling &scaling) {
    const int sources = shape.sources[blockIdx.y], targets = shape.targets[blockIdx.y];
    const Int64 count = shape.counts[blockIdx.y];
    const int *ranks = shape.ranks[blockIdx.y];
    if (sources <= 2)
        combine_job<Dtype, Operation, Scale, 2>(at, ranks, sources, targets, count, scaling);
    else if (sources <= 4)
        combine_job<Dtype, Operation, Scale, 4>(at, ranks, sources, targets, count, scaling);
    else
        combine_job<Dtype, Operation, Scale, 8>(at, ranks, sources, targets, count, scaling);
}

// `combine` where every job has one source.
template <class Dtype, class Scale>
INLINE void copy(const Int64 *at, const Shape &shape, const Scaling &scaling) {
    const int job = blockIdx.y;
    combine_job<Dtype, First, Scale, 1>(at, shape.ranks[job], 1, shape.targets[job], shape.counts[job], scaling);
}

// ---- pack and unpack ------------------------------------------------------------------------------------------------

struct Tile {
    int tensor, number;
};

struct Extent {  // in items; the offset is where the tensor begins in the buffer
    Int64 count, offset;
};

struct Tiles {
    const Tile *tiles;
    const Extent *extents;
    const Int64 *addresses;
    char *buffer;
};

// Move items of a tile, N at a time, by all threads of the block, from item ``first`` on. All loads precede the first
// store.
template <class From, class To, class Wide, class Scale, int N, int UNROLL>
INLINE void move_items(const char *from, char *to, int first, int count, const Scaling &scaling) {
    typedef typename From::Item Source;
    typedef typename To::Item Target;
    for (int i = first + threadIdx.x * N; i < count; i += UNROLL * N * blockDim.x) {
        Group<Source, N> loaded[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (i + int(u * N * blockDim.x) < count) loaded[u].load(from + (i + u * N * blockDim.x) * sizeof(Source));
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            Group<Target, N> result;
#pragma unroll
            for (int n = 0; n < N; ++n)
                result.items[n] =
                    To::narrow(typename To::Wide(Scale::apply(Wide(From::widen(loaded[u].items[n])), scaling)));
            if (i + int(u * N * blockDim.x) < count) result.store(to + (i + u * N * blockDim.x) * sizeof(Target));
        }
    }
}

template <class From, class To, class Wide, class Scale, int N>
INLINE void move(const char *from, char *to, int count, const Scaling &scaling) {
    int whole = 0;
    if (N > 1 && Int64(from) % (N * sizeof(typename From::Item)) == 0 &&
        Int64(to) % (N * sizeof(typename To::Item)) == 0) {
        whole = count / N * N;
        move_items<From, To, Wide, Scale, N, 4>(from, to, 0, whole, scaling);
    }
    move_items<From, To, Wide, Scale, 1, 8>(from, to, whole, count, scaling);
}

// Move one tile of a tensor between the tensor (of Dtype, in which it is scaled) and the buffer (of Wire).
template <bool PACK, class Dtype, class Wire, class Scale>
INLINE void move_tile(const Tiles &all, const Scaling &scaling) {
    typedef typename Dtype::Wide Wide;
    const Int64 SIZE = sizeof(typename Dtype::Item), ITEMS = TILE_BYTES / SIZE;
    const Tile tile = all.tiles[blockIdx.x];
    const Extent extent = all.extents[tile.tensor];
    const Int64 start = tile.number * ITEMS, left = extent.count - start;
    const int count = left < ITEMS ? left : ITEMS;
    char *const tensor = (char *)all.addresses[tile.tensor] + start * SIZE;
#ifdef __CUDACC__
    __builtin_assume(__isGlobal(tensor));  // the compiler cannot infer it for an address from a table
#endif
    char *const packed = all.buffer + (extent.offset + start) * sizeof(typename Wire::Item);
    if (PACK)
        move<Dtype, Wire, Wide, Scale, 16 / SIZE>(tensor, packed, count, scaling);
    else
        move<Wire, Dtype, Wide, Scale, 16 / SIZE>(packed, tensor, count, scaling);
}
"""
