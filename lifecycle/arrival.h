// What is looked at before a byte of an arriving tensor is used.
#ifndef LOADPLAN_LIFECYCLE_ARRIVAL_H_
#define LOADPLAN_LIFECYCLE_ARRIVAL_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "plan/load_plan.h"

namespace loadplan {

// What keeps the memory of `tensor` from being read as its elements, with a verb ("is sparse ...");
// empty where nothing does.
std::string_view KindProblem(const at::Tensor& tensor);

// InvalidArgument, naming the tensor with what was expected and what arrived, where `tensor` has
// another shape or dtype than declared or is no strided tensor of the plain kind (sparse,
// quantised, a subclass that hides its memory, a trace tensor); and, where `needs_memory`, where
// it is on meta.
absl::Status CheckDeclared(const SourceTensor& declared, const at::Tensor& tensor,
                           bool needs_memory);

// The same for bytes that come without a tensor around them.
absl::Status CheckDeclaredAs(const SourceTensor& declared, at::IntArrayRef shape,
                             at::ScalarType dtype);

// Whether `name` matches a shell pattern. `*` also matches dots.
bool MatchesPattern(const std::string& pattern, const std::string& name);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_ARRIVAL_H_
