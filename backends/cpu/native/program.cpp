// The exported functions of the CPU's kernels, and the walk over a program's steps.
#include "hs_collective.h"
#include "hs_cpu.h"
#include "kernels.h"
#include "team.h"

#if defined(HS_LEVEL_IS_AVX512VNNI)
#define HS_LEVEL_NAME "avx512vnni"
#elif defined(HS_LEVEL_IS_AVX512)
#define HS_LEVEL_NAME "avx512"
#elif defined(HS_LEVEL_IS_AVX2)
#define HS_LEVEL_NAME "avx2"
#else
#define HS_LEVEL_NAME "baseline"
#endif

#define HS_API extern "C" __attribute__((visibility("default")))

namespace hs {
namespace {

struct Kind {
    int (*chunks)(const Run &, const hs_step &) = nullptr;
    void (*run)(const Run &, const hs_step &, int chunk) = nullptr;
};

// The stages of every kind of step.
constexpr int STAGES_MOST = 4;
constexpr Kind STAGES[][STAGES_MOST] = {
    {},
    {{row_chunks, rope_table_chunk}},
    {{row_chunks, embed_chunk}},
    {{row_chunks, norm_chunk}},
    {{column_chunks, quantise_chunk}},
    {{linear_chunks, linear_chunk}},
    {{row_chunks, rope_store_chunk}},
    {{attention_chunks, attention_chunk}, {merge_chunks, merge_chunk}},
    {{column_chunks, gate_chunk}},
    {{row_chunks, select_chunk}},
    {{column_chunks, softcap_chunk}},
    {{column_chunks, add_gated_chunk}},
    {{route_chunks, route_chunk}, {expert_up_chunks, expert_up_chunk}, {expert_down_chunks, expert_down_chunk}, {combine_chunks, combine_chunk}},
    {{delta_conv_chunks, delta_conv_chunk}, {delta_rule_chunks, delta_rule_chunk}},
    {{column_chunks, scale_chunk}},
    {{column_chunks, zero_chunk}},
    {{join_chunks, join_chunk}, {join_keep_chunks, join_keep_chunk}},
};
constexpr int KINDS = sizeof STAGES / sizeof STAGES[0];
static_assert(KINDS == HS_STEP_JOIN + 1 && KINDS == HS_STEP_SUM, "a row for each HS_STEP that is no exchange");

// One exchange with other ranks, for the rows of the step's scope.
int32_t exchange_rows(const Run &run, const hs_step &step) {
    const hs_act &act = *step.act;
    const int rows = run.rows(step);
    if (rows == 0) return HS_OK;
    hs_stamp &stamp = act.exchange->stamp;
    stamp.epoch = run.batch.epoch;
    stamp.seq = run.batch.seq;
    stamp.rows = rows;
    switch (step.kind) {
        case HS_STEP_SUM:
            stamp.width = step.width;
            return hs_sum(act.mail, act.exchange, step.src, step.src_stride);
        case HS_STEP_GATHER:
            return hs_gather(act.mail, act.exchange, act.parts, act.part_count, act.target);
        case HS_STEP_MERGE: {
            const hs_merge merge{step.src,         step.dst,   step.weight,   step.add,   step.src_stride, step.dst_stride,
                                 step.add_stride, step.heads, step.head_dim, step.first, step.kv_heads};
            return hs_merge_heads(act.mail, act.exchange, &merge);
        }
        case HS_STEP_SEND:
            return hs_send(act.channel, act.exchange, act.parts, act.part_count);
        default:
            return hs_receive(act.channel, act.exchange, act.parts, act.part_count);
    }
}

class Walk final : public Job {
  public:
    explicit Walk(const Run &run) : run_(run) {}

    // The thread that ends a stage makes the exchanges that follow it: nobody else has work before they are done.
    int next_stage() override {
        for (;;) {
            stage_++;
            if (stage_ == STAGES_MOST) stage_ = 0, step_++;
            if (step_ == run_.program.step_count) return 0;
            if (step().kind >= HS_STEP_SUM) {
                stage_ = STAGES_MOST - 1;
                code_ = exchange_rows(run_, step());
                if (code_ != HS_OK) return 0;
                continue;
            }
            const int chunks = kind().chunks ? kind().chunks(run_, step()) : 0;
            if (chunks > 0) return chunks;
        }
    }

    int32_t code() const { return code_; }
    int32_t at() const { return step_; }

    void run_chunk(int chunk) override { kind().run(run_, step(), chunk); }

    // Weights of the next linear step; of experts nobody knows yet which.
    Ahead ahead(int thread) const override {
        for (int next = step_ + 1; next < run_.program.step_count; next++) {
            const hs_step &step = run_.program.steps[next];
            if (step.kind == HS_STEP_LINEAR) return linear_ahead(run_, step, thread);
            if (step.kind == HS_STEP_EXPERTS) break;
        }
        return {};
    }

  private:
    const hs_step &step() const { return run_.program.steps[step_]; }
    const Kind &kind() const {
        const int number = step().kind;
        return STAGES[number > 0 && number < KINDS ? number : 0][stage_];
    }

    const Run &run_;
    int step_ = 0, stage_ = -1;
    int32_t code_ = HS_OK;
};

bool shape_is_sound(int type, int rows, int cols) {
    const int block = block_cols(type);
    return block > 0 && rows > 0 && cols > 0 && cols % block == 0;
}

// Matrices of one shape, `src_step` bytes apart in the file.
class Repack final : public Job {
  public:
    Repack(int type, int count, int rows, int cols, const uint8_t *src, size_t src_step, uint8_t *dst)
        : type_(type), rows_(rows), cols_(cols), groups_(groups_of(rows)), all_(static_cast<int64_t>(groups_) * count), src_(src),
          src_step_(src_step), dst_(dst) {}

    int next_stage() override {
        const bool first = !started_;
        started_ = true;
        return first ? static_cast<int>((all_ + GROUPS - 1) / GROUPS) : 0;
    }

    void run_chunk(int chunk) override {
        const int64_t first = static_cast<int64_t>(chunk) * GROUPS;
        const size_t dst_step = group_bytes(type_, cols_) * static_cast<size_t>(groups_);
        for (int64_t g = first; g < first + GROUPS && g < all_; g++) {
            const size_t matrix = static_cast<size_t>(g / groups_);
            repack_group(type_, rows_, cols_, src_ + src_step_ * matrix, dst_ + dst_step * matrix, static_cast<int>(g % groups_));
        }
    }

  private:
    static constexpr int GROUPS = 4;
    const int type_, rows_, cols_, groups_;
    const int64_t all_;
    const uint8_t *src_;
    const size_t src_step_;
    uint8_t *dst_;
    bool started_ = false;
};

}  // namespace
}  // namespace hs

HS_API int32_t hs_abi_version(void) { return HS_ABI_VERSION; }

HS_API void hs_abi_sizes(int32_t out[11]) {
    out[0] = sizeof(hs_matrix);
    out[1] = sizeof(hs_part);
    out[2] = sizeof(hs_stack);
    out[3] = sizeof(hs_experts);
    out[4] = sizeof(hs_delta);
    out[5] = sizeof(hs_join);
    out[6] = sizeof(hs_step);
    out[7] = sizeof(hs_kv_group);
    out[8] = sizeof(hs_program);
    out[9] = sizeof(hs_batch);
    out[10] = sizeof(hs_kept);
}

HS_API const char *hs_level(void) { return HS_LEVEL_NAME; }

HS_API int32_t hs_host_levels(void) {
    int32_t levels = HS_LEVEL_BASELINE;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2) levels |= HS_LEVEL_AVX2;
    if (avx512) levels |= HS_LEVEL_AVX512;
    if (avx512 && __builtin_cpu_supports("avx512vnni")) levels |= HS_LEVEL_AVX512VNNI;
#endif
    return levels;
}

HS_API size_t hs_packed_bytes(int32_t type, int32_t rows, int32_t cols) {
    if (!hs::shape_is_sound(type, rows, cols)) return 0;
    return hs::group_bytes(type, cols) * static_cast<size_t>(hs::groups_of(rows));
}

HS_API size_t hs_activation_bytes(int32_t cols) { return hs::activation_bytes(cols); }

HS_API size_t hs_partial_floats(int32_t threads, int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t lane_pages) {
    return hs::partial_floats(threads, heads, kv_heads, head_dim, lane_pages);
}

HS_API int32_t hs_repack(hs_team *team, int32_t type, int32_t rows, int32_t cols, const uint8_t *src, uint8_t *dst) {
    if (hs::block_cols(type) == 0) return HS_E_TYPE;
    if (!hs::shape_is_sound(type, rows, cols)) return HS_E_SHAPE;
    hs::Repack job(type, 1, rows, cols, src, 0, dst);
    team->team.run(job);
    return HS_OK;
}

HS_API int32_t hs_repack_stack(hs_team *team, int32_t type, int32_t count, int32_t pitch, int32_t first, int32_t rows, int32_t cols,
                               const uint8_t *src, uint8_t *dst) {
    if (hs::block_cols(type) == 0) return HS_E_TYPE;
    if (!hs::shape_is_sound(type, rows, cols) || count < 1 || first < 0 || first > pitch - rows) return HS_E_SHAPE;
    const size_t row_bytes = static_cast<size_t>(cols / hs::block_cols(type)) * static_cast<size_t>(hs::file_block_bytes(type));
    hs::Repack job(type, count, rows, cols, src + row_bytes * static_cast<size_t>(first), row_bytes * static_cast<size_t>(pitch), dst);
    team->team.run(job);
    return HS_OK;
}

HS_API int32_t hs_unpack_row(const hs_matrix *matrix, int32_t row, float *dst) {
    if (hs::block_cols(matrix->type) == 0) return HS_E_TYPE;
    if (!hs::shape_is_sound(matrix->type, matrix->rows, matrix->cols) || row < 0 || row >= matrix->rows) return HS_E_SHAPE;
    hs::unpack_row(*matrix, row, dst);
    return HS_OK;
}

HS_API int32_t hs_run(hs_team *team, const hs_program *program, hs_batch *batch) {
    if (!hs::batch_is_sound(*program, *batch)) return HS_E_BATCH;
    hs::Run run{*program, *batch, team->team.threads(), 0, 0, 0, 0, nullptr};
    if (program->group_count > 0) hs::cut_tiles(run);
    if (program->state_slots > 0) hs::cut_lane_runs(run);
    hs::Walk walk(run);
    team->team.run(walk);
    batch->failed_step = walk.at();
    return walk.code();
}

HS_API int32_t hs_accept(hs_team *team, const hs_program *program, const hs_kept *kept, int32_t count) {
    if (!hs::kept_is_sound(*program, kept, count)) return HS_E_BATCH;
    hs::accept_kept(team->team, *program, kept, count);
    return HS_OK;
}
