#include "geometry/divide.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace loadplan::geometry_internal {
namespace {

absl::Status CutsAtom(const char* why) {
  return absl::FailedPreconditionError(
      absl::StrCat("an item of a cast map would have to be cut: ", why,
                   "; the items of both maps must coincide on the storage between them"));
}

// Whether every digit below an atom is complete.
bool HasWholeAtoms(const CommonPart& part, Index atom) {
  for (size_t j = 0; j < part.digits.size() && part.system.weights[j] < atom; ++j) {
    if (part.digits[j].start != 0 || part.digits[j].stop != part.system.radix(j)) return false;
  }
  return true;
}

// Whether the bytes of an atom lie side by side on the O side of `box` too.
bool IsContiguousInAtom(const DigitSystem& system, const DigitBox& box, Index atom) {
  for (size_t j = 0; j < box.digits.size() && system.weights[j] < atom; ++j) {
    if (box.digits[j].other != system.weights[j]) return false;
  }
  return true;
}

class Division {
 public:
  Division(Index* pieces_left, OnCommon on_common)
      : pieces_left_(*pieces_left), on_common_(on_common) {}

  absl::Status Run(const Grid& a, const Grid& b, std::vector<Grid>* rest) {
    if (!Meet(a.Span(), b.Span())) return Keep(a, rest);
    DigitSystem system;
    std::optional<Offender> offender;
    if (FindWeights(a, b, &system, &offender)) return OnDigits(a, b, system, rest);
    return RunClipped(a, b, rest);
  }

 private:
  static bool Meet(ByteRange a, ByteRange b) { return a.start < b.stop && b.start < a.stop; }

  // Strides of dimensions that lie outside the other grid do not matter: takes those
  // away, and unrolls a dimension where the others still do not fit together.
  absl::Status RunClipped(Grid a, Grid b, std::vector<Grid>* rest) {
    DigitSystem system;
    std::optional<Offender> offender;
    // Each round may open the way for the next; more than a few rarely help.
    for (int round = 0; round < 3; ++round) {
      bool vanished = false;
      const bool changed_a = ClipToSpan(b.Span(), &a, rest, &vanished);
      if (vanished) return Take(1);
      const bool changed_b = ClipToSpan(a.Span(), &b, nullptr, &vanished);
      if (vanished) return Keep(a, rest);
      if (FindWeights(a, b, &system, &offender)) return OnDigits(a, b, system, rest);
      if (!changed_a && !changed_b) break;
    }
    if (!offender) return CutsAtom("the itemsizes do not divide one another");
    return offender->in_first ? UnrollA(a, b, offender->dim, rest)
                              : UnrollB(a, b, offender->dim, rest);
  }

  absl::Status Take(Index count) {
    pieces_left_ -= std::min(count, pieces_left_ + 1);
    if (pieces_left_ >= 0) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        "more pieces than `max_pieces` are needed: strides do not divide one another");
  }

  absl::Status Keep(const Grid& a, std::vector<Grid>* rest) {
    if (rest != nullptr) rest->push_back(a);
    return Take(1);
  }

  absl::Status OnDigits(const Grid& a, const Grid& b, DigitSystem& system,
                        std::vector<Grid>* rest) {
    ChooseBase(a, b, &system);
    DigitBoxes a_boxes;
    DigitBoxes b_boxes;
    if (!Split(a, system, pieces_left_, &a_boxes) || !Split(b, system, pieces_left_, &b_boxes)) {
      return Take(pieces_left_ + 1);
    }
    absl::InlinedVector<Digit, 5> common;
    DigitBoxes left;
    DigitBoxes next;
    for (const DigitBox& a_box : a_boxes) {
      left.assign(1, a_box);
      for (const DigitBox& b_box : b_boxes) {
        next.clear();
        for (const DigitBox& box : left) {
          if (!Intersect(box, b_box, &common)) {
            next.push_back(box);
            continue;
          }
          if (absl::Status s = Take(1); !s.ok()) return s;
          const CommonPart part{system, box, b_box, common, a, b};
          if (!HasWholeAtoms(part, std::max(a.atom, b.atom))) {
            return CutsAtom("the other operand has a part of it");
          }
          if (absl::Status s = on_common_(part); !s.ok()) return s;
          if (rest == nullptr) {
            next.push_back(box);
          } else {
            AppendDifference(box, common, &next);
          }
        }
        std::swap(left, next);
      }
      if (rest == nullptr) continue;
      if (absl::Status s = Take(static_cast<Index>(left.size())); !s.ok()) return s;
      for (const DigitBox& box : left) {
        rest->push_back(GridOf(box, system, a.atom, a.other_atom));
      }
    }
    return absl::OkStatus();
  }

  absl::Status UnrollA(const Grid& a, const Grid& b, size_t dim, std::vector<Grid>* rest) {
    const Index extent = a.dims[dim].extent;
    if (absl::Status s = Take(extent); !s.ok()) return s;
    for (Index i = 0; i < extent; ++i) {
      if (absl::Status s = Run(Select(a, dim, i), b, rest); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  // The parts of `b` come in ascending order of their starts, so that what lies
  // before one of them is done with, and few pieces stay active.
  absl::Status UnrollB(const Grid& a, const Grid& b, size_t dim, std::vector<Grid>* rest) {
    const Index extent = b.dims[dim].extent;
    if (absl::Status s = Take(extent); !s.ok()) return s;
    std::vector<Grid> active{a};
    std::vector<Grid> next;
    for (Index i = 0; i < extent; ++i) {
      const Grid part = Select(b, dim, i);
      if (rest == nullptr) {
        if (absl::Status s = Run(a, part, nullptr); !s.ok()) return s;
        continue;
      }
      const ByteRange span = part.Span();
      next.clear();
      for (Grid& grid : active) {
        const ByteRange grid_span = grid.Span();
        if (grid_span.stop <= span.start) {
          rest->push_back(std::move(grid));
        } else if (!Meet(grid_span, span)) {
          next.push_back(std::move(grid));
        } else if (absl::Status s = Run(grid, part, &next); !s.ok()) {
          return s;
        }
      }
      std::swap(active, next);
    }
    if (rest != nullptr) rest->insert(rest->end(), active.begin(), active.end());
    return absl::OkStatus();
  }

  Index& pieces_left_;
  OnCommon on_common_;
};

}  // namespace

Index CommonPart::nbytes() const {
  Index count = 1;
  for (const Digit& digit : digits) count *= digit.extent();
  return count;
}

Grid CommonPart::OnA() const {
  DigitBox box = a;
  for (size_t j = 0; j < digits.size(); ++j) {
    box.other_offset += (digits[j].start - a.digits[j].start) * a.digits[j].other;
    box.digits[j].start = digits[j].start;
    box.digits[j].stop = digits[j].stop;
  }
  return GridOf(box, system, grid_a.atom, grid_a.other_atom);
}

absl::StatusOr<StridedMap> CommonPart::Join(const GridDims& repeats) const {
  const Index atom = std::max(grid_a.atom, grid_b.atom);
  if (grid_a.atom != 0 && grid_b.atom != 0 && grid_a.atom != grid_b.atom) {
    return CutsAtom("the itemsizes of two casts differ");
  }
  // A cast has no pairs inside its atoms; the other operand must keep them together.
  if (grid_a.atom == 0 && !IsContiguousInAtom(system, a, atom)) {
    return CutsAtom("`outer` takes it apart");
  }
  if (grid_b.atom == 0 && !IsContiguousInAtom(system, b, atom)) {
    return CutsAtom("`inner` joins it from parts");
  }
  DimVector shape;
  MapSide to{a.other_offset, {}, 1};
  MapSide from{b.other_offset, {}, 1};
  if (atom != 0) {
    to.itemsize = grid_a.atom != 0 ? grid_a.other_atom : atom;
    from.itemsize = grid_b.atom != 0 ? grid_b.other_atom : atom;
  }
  const auto append = [&](Index extent, Index to_stride, Index from_stride) {
    shape.push_back(extent);
    to.byte_strides.push_back(to_stride);
    from.byte_strides.push_back(from_stride);
  };
  for (const GridDim& dim : repeats) append(dim.extent, dim.other, 0);
  for (size_t j = digits.size(); j-- > 0;) {
    to.byte_offset += (digits[j].start - a.digits[j].start) * a.digits[j].other;
    from.byte_offset += (digits[j].start - b.digits[j].start) * b.digits[j].other;
    if (digits[j].extent() == 1 || system.weights[j] < atom) continue;
    append(digits[j].extent(), a.digits[j].other, b.digits[j].other);
  }
  return Coalesce(
      StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), atom != 0));
}

absl::Status Divide(const Grid& a, const Grid& b, Index* pieces_left, OnCommon on_common,
                    std::vector<Grid>* rest) {
  return Division(pieces_left, on_common).Run(a, b, rest);
}

}  // namespace loadplan::geometry_internal
