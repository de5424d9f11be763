# Installs the built library into a scratch folder, then does what a user would: configures, builds and
# runs impl/examples as a project of its own, with nothing but CMAKE_PREFIX_PATH to go by.
# Variables: SOURCE and BUILD of the project, LIBTORCH, GENERATOR, SCRATCH (emptied first).

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result COMMAND_ECHO STDOUT)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "ended with ${result}: ${ARGN}")
  endif()
endfunction()

# must_not_mention(FILE WORD...): what the library was built with must not follow it to its users.
function(must_not_mention file)
  file(READ "${file}" text)
  foreach(word IN LISTS ARGN)
    string(FIND "${text}" "${word}" place)
    if(NOT place EQUAL -1)
      message(FATAL_ERROR "${file} mentions ${word}, which users of the library do not have or want")
    endif()
  endforeach()
endfunction()

# Of an environment for building, nothing may be needed.
unset(ENV{CMAKE_PREFIX_PATH})
unset(ENV{Torch_DIR})
file(REMOVE_RECURSE "${SCRATCH}")
set(prefix "${SCRATCH}/prefix")
set(user_build "${SCRATCH}/build")

run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}")
file(GLOB_RECURSE installed "${prefix}/*.cmake" "${prefix}/*.h")
foreach(file IN LISTS installed)
  must_not_mention("${file}" "fmt/" "fmt::" "nlohmann" "-Werror" "cmake_pch" "shardproof_flags" "${SOURCE}/impl")
endforeach()

file(COPY "${SOURCE}/impl/examples/" DESTINATION "${SCRATCH}/examples")
run("${CMAKE_COMMAND}" -S "${SCRATCH}/examples" -B "${user_build}" -G "${GENERATOR}"
    "-DCMAKE_PREFIX_PATH=${prefix};${LIBTORCH}" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
must_not_mention("${user_build}/compile_commands.json" "-Werror" "-Wall" "cmake_pch" "-ffp-contract" "${SOURCE}/impl")
# One of the two, because each takes half a minute to compile.
run("${CMAKE_COMMAND}" --build "${user_build}" --target fsdp_train)
run("${user_build}/fsdp_train" "${SCRATCH}/examples/train.cpp" 3 20)
