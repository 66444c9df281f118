// gated_delta: one Gated DeltaNet layer between its matrices, one block a value head, token after token:
//   q, k, v = silu(causal convolution of qkv); q, k = l2_norm(q), l2_norm(k); value head h has key head h % N_K_HEADS
//   decay = exp(softplus(alpha + dt) * a), b = sigmoid(beta)
//   S = S * decay; delta = (v - S k) * b; S = S + k delta^T; o = (S q) / sqrt(D)
//   y = rms_norm(o, norm_weight) * silu(z), and y quantised in groups of 32
// qkv (n_tokens, CHANNELS) f32, z (n_tokens, N_V_HEADS * D) f32, alpha, beta (n_tokens, N_V_HEADS) f32,
//   conv_weight (CHANNELS, D_CONV) f32, dt, a (N_V_HEADS) f32, norm_weight (D) f32
//   -> y (n_tokens, N_V_HEADS * D) f32, q8 (n_tokens, N_V_HEADS * D) i8, scales (n_tokens, N_V_HEADS * D / 32)
// in place: ssm_state (N_V_HEADS, D value rows, D key columns) f32, conv_state (D_CONV - 1, CHANNELS) f32, oldest
//   first; tickets (N_K_HEADS) u32, zero before the first call and after each
// bytes    8 * N_V_HEADS * D * D, and 4 * (CHANNELS * (D_CONV * 2 + n_tokens - 2) + n_tokens * N_V_HEADS * D * 2.3)
// launch   grid (N_V_HEADS), block (512); any n_tokens, in chunks of 16; needs D 32, 64 or 128
// numerics docs/numerics.md, "Gated DeltaNet layer": a warp owns D / 16 rows of S, a lane four columns of each, in
//   registers from the first token to the last; the convolution starts at +0, oldest input first
// faults   gated_delta, on o, and on what goes into the gates, which would make 0 or 1 of an infinity. Each element of
//   S is a factor in o in the step that made it, and a NaN or infinity stays one whatever it is multiplied by: so o
//   checks S as well
// races    N_V_HEADS / N_K_HEADS blocks read the convolution inputs of one key head. Each takes a ticket after reading;
//   who draws the last one, and so knows that nobody still reads, shifts the inputs. One buffer is enough.

constexpr int GDN_WARPS = 16;
constexpr int GDN_CHUNK = 16;  // tokens whose q, k, v are in shared memory at a time; at most one a warp for the norm

template <int D, int N>
struct __align__(16) GdnChunk {
    float q[N][D], k[N][D], v[N][D], o[N][D];
    float decay[N], b[N];
    bool shifts_key_head;
};

struct GatedDeltaArguments {
    const float *qkv, *z, *alpha, *beta, *conv_weight, *dt, *a, *norm_weight;
    int n_tokens;
    float eps, scale;
    float *conv_state, *ssm_state;
    u32* tickets;
    float* y;
    i8* q8;
    GroupScale* scales;
    u32 op;
    u32* fault;
};

template <int D_CONV>
struct ConvInputs {
    float4 x[D_CONV];       // of four channels, oldest first
    float4 weight[D_CONV];  // of the same channels, channel by channel
};

// Input number `token` of four channels; tokens before this call's first are in the state.
template <int D_CONV, int CHANNELS>
__device__ __forceinline__ float4 conv_input(const float* qkv, const float* conv_state, int token, int channel) {
    const float* row = token < 0 ? conv_state + (token + D_CONV - 1) * CHANNELS : qkv + i64(token) * CHANNELS;
    return *reinterpret_cast<const float4*>(row + channel);
}

template <int D_CONV, int CHANNELS>
__device__ __forceinline__ ConvInputs<D_CONV> load_conv_inputs(const float* qkv, const float* conv_state,
                                                               const float* conv_weight, int token, int channel) {
    ConvInputs<D_CONV> in;
#pragma unroll
    for (int tap = 0; tap < D_CONV; tap++) {
        in.x[tap] = conv_input<D_CONV, CHANNELS>(qkv, conv_state, token - (D_CONV - 1) + tap, channel);
        in.weight[tap] = load_quad(conv_weight + channel * D_CONV, tap);
    }
    return in;
}

// Element i of an array of quads, i known at compile time.
template <int N>
__device__ __forceinline__ float element(const float4 (&quads)[N], int i) {
    const float4 v = quads[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

template <int D_CONV>
__device__ __forceinline__ float4 conv_silu(const ConvInputs<D_CONV>& in) {
    float4 sum = zero_quad();
#pragma unroll
    for (int tap = 0; tap < D_CONV; tap++) {
        const float4 w = make_float4(element(in.weight, tap), element(in.weight, D_CONV + tap),
                                     element(in.weight, 2 * D_CONV + tap), element(in.weight, 3 * D_CONV + tap));
        sum = add_quad(sum, mul_quad(w, in.x[tap]));
    }
    return silu_quad(sum);
}

__device__ __forceinline__ float4 l2_norm(float4 v, float eps) {
    const float norm = root(tree(add_products(0.0f, v, v)));
    return mul_quad(v, div(1.0f, norm < eps ? eps : norm));  // a NaN stays
}

// Drop the oldest inputs of four channels and append this call's.
template <int D_CONV, int CHANNELS>
__device__ __forceinline__ void shift_conv_state(const float* qkv, float* conv_state, int n_tokens, int channel) {
    float4 kept[D_CONV - 1];
#pragma unroll
    for (int i = 0; i < D_CONV - 1; i++) {
        kept[i] = conv_input<D_CONV, CHANNELS>(qkv, conv_state, n_tokens - (D_CONV - 1) + i, channel);
    }
#pragma unroll
    for (int i = 0; i < D_CONV - 1; i++) *reinterpret_cast<float4*>(conv_state + i * CHANNELS + channel) = kept[i];
}

// y = rms_norm(o, norm_weight) * silu_z of one head, D elements in the quads of a warp; offset: of the head in y.
template <int D>
__device__ __forceinline__ void gated_norm(const float* o, float4 norm_weight, float4 silu_z, float eps, int lane,
                                           float* y, i8* q8, GroupScale* scales, u32 op, u32* fault) {
    const bool has_columns = lane < D / 4;
    const float4 v = has_columns ? load_quad(o, lane) : zero_quad();
    check_finite(v.x, op, fault);
    check_finite(v.y, op, fault);
    check_finite(v.z, op, fault);
    check_finite(v.w, op, fault);
    const float mean = div(tree(add_products(0.0f, v, v)), float(D));
    const float rms_scale = div(1.0f, root(add(mean, eps)));
    const float4 gated = mul_quad(mul_quad(mul_quad(v, rms_scale), norm_weight), silu_z);
    if (has_columns) store_quad(y, lane, gated);
    quantize_quad(gated, lane, has_columns, q8, scales);
}

// One value head, by a block; wait() returns when what other kernels or blocks write is there.
template <int D, int D_CONV, int N_K_HEADS, int N_V_HEADS, int CHUNK, class Wait>
__device__ __forceinline__ void gated_delta_head(const GatedDeltaArguments& in, int head, GdnChunk<D, CHUNK>& chunk,
                                                 Wait wait) {
    static_assert(D % SUB_BLOCK == 0 && D <= 4 * WARP && D_CONV >= 2 && D_CONV <= GDN_CHUNK && CHUNK <= GDN_WARPS);
    static_assert(N_V_HEADS % N_K_HEADS == 0);
    constexpr int KEY_DIM = N_K_HEADS * D, VALUE_DIM = N_V_HEADS * D, CHANNELS = 2 * KEY_DIM + VALUE_DIM;
    constexpr int ROWS = D / GDN_WARPS, SHARED_BY = N_V_HEADS / N_K_HEADS;
    const int key_head = head % N_K_HEADS, n_tokens = in.n_tokens;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool has_columns = lane < D / 4;
    // Convolving token t is three tasks, dealt to the warps by conv_task; the norm of its output falls to the warps from
    // the other end, so that a single token's are spread over four.
    const int normed_token = GDN_WARPS - 1 - warp;
    const auto channel_of = [&](int task) {
        const int part = task % 3;
        return (part == 0 ? key_head * D : part == 1 ? KEY_DIM + key_head * D : 2 * KEY_DIM + head * D) + 4 * lane;
    };
    const auto load_task = [&](int task, int first) {
        return load_conv_inputs<D_CONV, CHANNELS>(in.qkv, in.conv_state, in.conv_weight, first + task / 3,
                                                  channel_of(task));
    };

    // S, the bulk of the bytes, is asked for first, before the kernel before has ended: only this kernel touches it within
    // a step. Then all that the first chunk reads, before any of it is used.
    float* own_state = in.ssm_state + (head * D + warp * ROWS) * D;
    float4 s[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) s[r] = has_columns ? load_quad(own_state + r * D, lane) : zero_quad();
    const float4 norm_quad = has_columns ? load_quad(in.norm_weight, lane) : zero_quad();
    wait();
    ConvInputs<D_CONV> inputs;
    const int first_task = conv_task<GDN_WARPS>(warp, 0);
    if (has_columns && first_task < 3 * n_tokens) inputs = load_task(first_task, 0);

    for (int first = 0; first < n_tokens; first += CHUNK) {
        const int n = n_tokens - first < CHUNK ? n_tokens - first : CHUNK;
        for (int i = 0, task = first_task; task < 3 * n; task = conv_task<GDN_WARPS>(warp, ++i)) {
            if (has_columns && (i > 0 || first > 0)) inputs = load_task(task, first);
            float4 out = has_columns ? conv_silu(inputs) : zero_quad();
            const int part = task % 3;
            if (part < 2) out = l2_norm(out, in.eps);
            float* to = part == 0 ? chunk.q[task / 3] : part == 1 ? chunk.k[task / 3] : chunk.v[task / 3];
            if (has_columns) store_quad(to, lane, out);
        }
        float4 silu_z = zero_quad();
        const i64 out_row = i64(first + normed_token) * VALUE_DIM + head * D;
        if (has_columns && normed_token < n) silu_z = silu_quad(load_quad(in.z + out_row, lane));
        if (warp == GDN_WARPS - 2 && lane < n) {
            const int at = (first + lane) * N_V_HEADS + head;
            const float raised = add(in.alpha[at], in.dt[head]), g = mul(softplus(raised), in.a[head]);
            check_finite(raised, in.op, in.fault);
            check_finite(g, in.op, in.fault);
            check_finite(in.beta[at], in.op, in.fault);
            chunk.decay[lane] = exp_(g);
            chunk.b[lane] = sigmoid(in.beta[at]);
        }
        __syncthreads();
        // The block has used what it read of the convolution inputs. No fence: a load that has returned sees no later
        // write, and who shifts does so because of the ticket that it drew. Nobody waits for the ticket before the end.
        u32 ticket = 0;
        if (first == 0 && threadIdx.x == 0) ticket = atomicInc(&in.tickets[key_head], SHARED_BY - 1);
        for (int t = 0; t < n; t++) delta_step<D, ROWS>(s, chunk, t, warp * ROWS, lane, in.scale);
        if (first == 0 && threadIdx.x == 0) chunk.shifts_key_head = ticket == SHARED_BY - 1;
        __syncthreads();
        if (normed_token < n) {
            gated_norm<D>(chunk.o[normed_token], norm_quad, silu_z, in.eps, lane, in.y + out_row, in.q8 + out_row,
                          in.scales + out_row / SUB_BLOCK, in.op, in.fault);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (has_columns) store_quad(own_state + r * D, lane, s[r]);
    }
    if (has_columns && (warp == 2 || (warp < 2 && chunk.shifts_key_head))) {
        shift_conv_state<D_CONV, CHANNELS>(in.qkv, in.conv_state, n_tokens, channel_of(warp));
    }
}

template <int D, int D_CONV, int N_K_HEADS, int N_V_HEADS>
__global__ void __launch_bounds__(GDN_WARPS* WARP)
    gated_delta(const float* qkv, const float* z, const float* alpha, const float* beta, const float* conv_weight,
                const float* dt, const float* a, const float* norm_weight, int n_tokens, float eps, float scale,
                float* conv_state, float* ssm_state, u32* tickets, float* y, i8* q8, GroupScale* scales, u32 op,
                u32* fault) {
    __shared__ GdnChunk<D, GDN_CHUNK> chunk;
    release_dependents();
    const GatedDeltaArguments in{qkv, z,     alpha,      beta,      conv_weight, dt, a,  norm_weight, n_tokens,
                                 eps, scale, conv_state, ssm_state, tickets,     y,  q8, scales,      op,
                                 fault};
    gated_delta_head<D, D_CONV, N_K_HEADS, N_V_HEADS>(in, blockIdx.x, chunk, [] { dependency_wait(); });
}
