// The tensors of a safetensors file, in memory that maps the file.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

// In the order of the header. Throws std::runtime_error for a file that is none.
std::vector<std::pair<std::string, at::Tensor>> ReadSafetensors(const std::string& path);
