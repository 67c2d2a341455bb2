" Where the daemon listens, and how it is started.

let s:told = ''       " the socket, as `localspec start` told it
let s:waiting = []    " who is told when the job that starts it has ended; [] where none runs
let s:running = 0
let s:failed = 0      " when it could not be started
let s:why = ''
let s:again = 30      " seconds until that is tried anew

" The socket's path: as it was set, or told; else where it is by the environment.
function! localspec#daemon#socket() abort
  if exists('g:localspec_socket')
    return g:localspec_socket
  elseif !empty(s:told)
    return s:told
  elseif !empty($LOCALSPEC_HOME)
    return $LOCALSPEC_HOME .. '/run/localspec.sock'
  endif
  return (empty($XDG_RUNTIME_DIR) ? '/run/user/none' : $XDG_RUNTIME_DIR) .. '/localspec/localspec.sock'
endfunction

" The program's words before its command.
function! localspec#daemon#program() abort
  let program = get(g:, 'localspec_command', 'localspec')
  return type(program) == v:t_list ? program : [program]
endfunction

" Start it beside the editor and call `done` with '' when it listens, else with why it does not. Many who
" ask at once start it once, and after a failure it is let be for a while.
function! localspec#daemon#start(done) abort
  if !get(g:, 'localspec_start', 1)
    return a:done('The daemon is not running. To start it: localspec start')
  elseif !empty(s:why) && localtime() - s:failed < s:again
    return a:done(s:why)
  endif
  call add(s:waiting, a:done)
  if !s:running
    let s:running = 1
    call localspec#socket#run(localspec#daemon#program() + ['start', '--json'], function('s:started'))
  endif
endfunction

" Whether a job is starting it.
function! localspec#daemon#starting() abort
  return s:running
endfunction

function! s:started(code, out, err) abort
  let [waiting, s:waiting, s:running, s:why] = [s:waiting, [], 0, '']
  try
    let s:told = json_decode(a:out).socket
  catch
    let s:failed = localtime()
    let s:why = empty(trim(a:err)) ? 'The daemon could not be started.' : split(trim(a:err), "\n")[-1]
  endtry
  for Done in waiting
    call Done(s:why)
  endfor
endfunction
