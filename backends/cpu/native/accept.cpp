// Of lanes whose states were held (`hs_batch.hold`), the rows that count become part of their states.
//
// While a state is held nothing of it is written. A delta net walks a lane's rows on a copy of two blocks of a matrix at a time,
// which each thread has, and keeps what the rows would do to the state: q, k and v of each, their gates, and `mixed`. Of the
// product with M it keeps the result alone: what the row adds to M is k d^T, d = b (v - M^T k), and d lies where v lay. So the
// rows that count are played again without any sum over M, all of them in one pass over it:
//
//     run       M ─▶ copy ─▶ row 0 ─▶ row 1 ─▶ row 2 ─▶ row 3        kept: k, d, e^g of each row
//     accept 2  M = e^g M + k d^T of row 0, then of row 1            each element by the operations of a plain run, in their order
//
// Layers, lanes and heads are independent: all of them are the chunks of one stage.
#include "kernels.h"

namespace hs {
namespace {

class Accept final : public Job {
  public:
    Accept(const hs_program &program, const hs_kept *kept, int count) : program_(program), kept_(kept), count_(count), parts_(1) {
        for (int i = 0; i < program.state_step_count; i++) {
            const hs_step &step = step_at(i);
            if (step.kind == HS_STEP_DELTA && delta_accept_parts(*step.delta) > parts_) parts_ = delta_accept_parts(*step.delta);
        }
    }

    int next_stage() override {
        const bool first = !started_;
        started_ = true;
        return first ? program_.state_step_count * count_ * parts_ : 0;
    }

    void run_chunk(int chunk) override {
        const hs_step &step = step_at(chunk / (count_ * parts_));
        const hs_kept &kept = kept_[chunk / parts_ % count_];
        const int part = chunk % parts_;
        if (kept.rows == 0) return;
        if (step.kind == HS_STEP_JOIN) {
            if (part == 0) join_accept(step, kept);
        } else if (part < delta_accept_parts(*step.delta)) {
            delta_accept(*step.delta, kept, part);
        }
    }

  private:
    const hs_step &step_at(int index) const { return program_.steps[program_.state_steps[index]]; }

    const hs_program &program_;
    const hs_kept *const kept_;
    const int count_;
    int parts_;
    bool started_ = false;
};

}  // namespace

void accept_kept(Team &team, const hs_program &program, const hs_kept *kept, int count) {
    Accept job(program, kept, count);
    team.run(job);
}

}  // namespace hs
