// Operators that only move elements by indices or masks that are known while
// tracing: they are recorded as copies, so that what they move stays direct.
#ifndef LOADPLAN_BACKEND_MOVEMENT_H_
#define LOADPLAN_BACKEND_MOVEMENT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>
#include <vector>

#include "geometry/strided_map.h"

namespace loadplan {

// Note [Movement by labels]
//
//   y = w[idx]      labels of w: [0, 4, 8, 12]; run for real: labels[idx] = [8, 0]
//                   so y[0] is a copy of the item at byte 8 of w, y[1] of byte 0
//
// Each element of a data argument is replaced by a label that says where its bytes
// lie; the operator itself runs on the labels, and its result says where every
// element came from. Whatever the operator does with its indices is therefore done
// by torch, not by a second implementation of it.
struct MovementRule {
  std::string_view op;                  // `aten::index.Tensor`
  std::vector<std::string_view> data;   // arguments whose elements move (tensors or scalars)
  std::string_view must_be_false = "";  // a flag under which it computes (`accumulate`)
};

// nullptr where the operator is none that only moves.
const MovementRule* FindMovementRule(const c10::OperatorName& name);

// More elements than this are not labelled (8 bytes each); the operator is then a node.
inline constexpr int64_t kMaxLabels = int64_t{1} << 25;

// Labels of the elements of `tensor`, laid out as it is; `argument` tells tensors apart.
// Undefined where the elements lie too far apart.
at::Tensor LabelsOf(const at::Tensor& tensor, int64_t argument);

// A part of a result: a map from bytes of data argument `argument` to bytes of `to`.
struct Move {
  int64_t argument = 0;
  StridedMap map;
};

// Reads labels back: `labels` is laid out logically as `to`. Items that stay where they are
// (`in_place` is the argument that is `to` itself, or -1) are left out. nullopt
// where the pattern is too irregular to be held as maps.
std::optional<std::vector<Move>> MovesOf(const at::Tensor& labels, const at::Tensor& to,
                                         int64_t in_place);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_MOVEMENT_H_
