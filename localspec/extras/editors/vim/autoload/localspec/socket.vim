" What differs between Vim and Neovim in reaching the daemon: a stream over a Unix socket, and a job.
" Nothing here waits: bytes, ends and exit codes come as calls from the editor's own loop.

" Connect to the socket at `path`. `bytes` is called with what comes in, cut anywhere, and `closed` when
" the other end has closed. The stream, or {} where nobody listens.
function! localspec#socket#open(path, bytes, closed) abort
  let stream = {'bytes': a:bytes, 'closed': a:closed, 'open': 1}
  try
    if has('nvim')
      let stream.channel = sockconnect('pipe', a:path, {'on_data': function('s:nvim_data', [stream])})
      return stream.channel > 0 ? stream : {}
    endif
    let said = v:errmsg
    silent! let stream.channel = ch_open('unix:' .. a:path, {'mode': 'raw', 'noblock': 1,
          \ 'callback': function('s:vim_data', [stream]), 'close_cb': function('s:vim_closed', [stream])})
    let v:errmsg = said
    return has_key(stream, 'channel') && ch_status(stream.channel) ==# 'open' ? stream : {}
  catch
    return {}
  endtry
endfunction

" Write bytes: what does not fit into the socket at once is written later. False where it has closed.
function! localspec#socket#send(stream, bytes) abort
  try
    if has('nvim')
      return chansend(a:stream.channel, a:bytes) > 0
    endif
    call ch_sendraw(a:stream.channel, a:bytes)
    return ch_status(a:stream.channel) ==# 'open'
  catch
    return 0
  endtry
endfunction

" Close it; nothing is called any more.
function! localspec#socket#close(stream) abort
  let a:stream.open = 0
  try
    call call(has('nvim') ? 'chanclose' : 'ch_close', [a:stream.channel])
  catch
  endtry
endfunction

function! s:nvim_data(stream, channel, lines, name) abort
  if !a:stream.open
    return
  elseif a:lines ==# ['']
    let a:stream.open = 0
    call a:stream.closed()
  else
    call a:stream.bytes(join(a:lines, "\n"))
  endif
endfunction

function! s:vim_data(stream, channel, bytes) abort
  if a:stream.open
    call a:stream.bytes(a:bytes)
  endif
endfunction

function! s:vim_closed(stream, channel) abort
  if a:stream.open
    let a:stream.open = 0
    call a:stream.closed()
  endif
endfunction

" Run a program (a list of words) beside the editor. `done` is called with its exit code, what it wrote,
" and what it wrote to standard error; where it cannot be run, with -1 and why.
function! localspec#socket#run(words, done) abort
  if !executable(a:words[0])
    let said = a:words[0] .. ' is not found: set g:localspec_command to its path.'
    call timer_start(0, {_ -> a:done(-1, '', said)})
    return
  endif
  let job = {'done': a:done, 'out': '', 'err': '', 'code': -1, 'left': 2}
  try
    if has('nvim')
      call jobstart(a:words, {'stdin': 'null', 'stdout_buffered': 1, 'stderr_buffered': 1,
            \ 'on_stdout': {_, lines, __ -> extend(job, {'out': join(lines, "\n")})},
            \ 'on_stderr': {_, lines, __ -> extend(job, {'err': join(lines, "\n")})},
            \ 'on_exit': {_, code, __ -> job.done(code, job.out, job.err)}})
      return
    endif
    call job_start(a:words, {'in_io': 'null', 'mode': 'raw',
          \ 'out_cb': {_, bytes -> extend(job, {'out': job.out .. bytes})},
          \ 'err_cb': {_, bytes -> extend(job, {'err': job.err .. bytes})},
          \ 'exit_cb': {_, code -> s:vim_done(extend(job, {'code': code}))},
          \ 'close_cb': {_ -> s:vim_done(job)}})
  catch
    call timer_start(0, {_ -> a:done(-1, '', matchstr(v:exception, 'E\d\+.*'))})
  endtry
endfunction

" A job is over when it has ended and all it wrote is read, in either order.
function! s:vim_done(job) abort
  let a:job.left -= 1
  if !a:job.left
    call a:job.done(a:job.code, a:job.out, a:job.err)
  endif
endfunction
