" HTTP/1.1 and server-sent events, as much as the daemon speaks, read as they come.

let s:longest_head = 65536
let s:longest_line = 8388608

" An answer of which nothing has been read yet.
function! localspec#http#answer() abort
  return {'state': 'head', 'rest': '', 'left': 0, 'status': 0, 'events': 0, 'body': '', 'line': ''}
endfunction

" Read on: `bytes` may be cut anywhere. The events that are complete now; other bodies are gathered in
" `answer.body`. `answer.state` is 'done' at the end.
" Throws: what came is no answer.
function! localspec#http#feed(answer, bytes) abort
  let answer = a:answer
  let answer.rest ..= a:bytes
  while answer.state ==# 'head' && s:head(answer)
  endwhile
  let body = answer.state ==# 'head' ? '' : s:body(answer)
  if !answer.events
    let answer.body ..= body
    return []
  endif
  let lines = split(answer.line .. body, "\n", 1)
  let answer.line = remove(lines, -1)
  if strlen(answer.line) > s:longest_line
    throw 'localspec: the answer has an event that never ends'
  endif
  call filter(map(lines, {_, line -> matchstr(line, '^data:\s*\zs{.*\ze\r\?$')}), {_, data -> !empty(data)})
  return map(lines, {_, data -> json_decode(data)})
endfunction

" The other end has closed: whether the answer is whole.
function! localspec#http#closed(answer) abort
  return a:answer.state ==# 'done' || a:answer.state ==# 'close'
endfunction

" Read the head, where all of it has come; false where that is not so.
function! s:head(answer) abort
  let start = 'HTTP/1.'
  let length = min([strlen(start), strlen(a:answer.rest)])
  let end = stridx(a:answer.rest, "\r\n\r\n")
  if strpart(a:answer.rest, 0, length) !=# strpart(start, 0, length) || end < 0 && strlen(a:answer.rest) > s:longest_head
    throw 'localspec: what the socket says is not HTTP'
  elseif end < 0
    return 0
  endif
  let lines = split(strpart(a:answer.rest, 0, end), "\r\n", 1)
  let a:answer.rest = strpart(a:answer.rest, end + 4)
  let a:answer.status = str2nr(matchstr(lines[0], '^HTTP/1\.\d \zs\d\{3}'))
  if a:answer.status / 100 == 1
    return 1
  endif
  let a:answer.state = 'close'
  for line in lines[1:]
    let [name, value] = matchlist(line .. ':', '^\([^:]*\):\s*\(.\{-}\)\s*:$')[1:2]
    if name ==? 'transfer-encoding' && value =~? 'chunked'
      let a:answer.state = 'size'
    elseif name ==? 'content-length' && a:answer.state !=# 'size'
      let a:answer.left = str2nr(value)
      let a:answer.state = a:answer.left ? 'length' : 'done'
    elseif name ==? 'content-type'
      let a:answer.events = value =~? '^text/event-stream'
    endif
  endfor
  return 0
endfunction

" The bytes of the body that are new.
function! s:body(answer) abort
  let answer = a:answer
  let found = ''
  while !empty(answer.rest) && answer.state !=# 'done'
    if answer.state ==# 'close'
      let [found, answer.rest] = [found .. answer.rest, '']
    elseif answer.state ==# 'length' || answer.state ==# 'data'
      let part = strpart(answer.rest, 0, answer.left)
      let found ..= part
      let answer.left -= strlen(part)
      let answer.rest = strpart(answer.rest, strlen(part))
      if !answer.left
        let answer.state = answer.state ==# 'data' ? 'mark' : 'done'
      endif
    elseif !s:mark(answer)
      break
    endif
  endwhile
  return found
endfunction

" Read one line between chunks; false where it has not all come.
function! s:mark(answer) abort
  let end = stridx(a:answer.rest, "\r\n")
  if end < 0 && strlen(a:answer.rest) < 4096
    return 0
  endif
  let line = strpart(a:answer.rest, 0, max([end, 0]))
  let size = matchstr(line, '^\x\{1,7}\ze\s*\%(;.*\)\?$')
  if end < 0 || a:answer.state ==# 'mark' && end > 0 || a:answer.state ==# 'size' && empty(size)
    throw 'localspec: the answer is not chunked as it says'
  endif
  let a:answer.rest = strpart(a:answer.rest, end + 2)
  if a:answer.state ==# 'mark'
    let a:answer.state = 'size'
  elseif a:answer.state ==# 'size'
    let a:answer.left = str2nr(size, 16)
    let a:answer.state = a:answer.left ? 'data' : 'trailer'
  elseif empty(line)
    let a:answer.state = 'done'
  endif
  return 1
endfunction

" Send a request; `event` is called with each event of the answer, and `ended` once: with '' where the
" answer is whole, else with a sentence. Where no daemon listens, it is started first, unless the last argument
" is 0. The request, for localspec#http#cancel.
function! localspec#http#ask(target, fields, event, ended, start = 1) abort
  let request = {'live': 1, 'event': a:event, 'ended': a:ended, 'answer': localspec#http#answer()}
  let body = s:json(a:fields)
  let request.bytes = join([
        \ 'POST ' .. a:target .. ' HTTP/1.1', 'Host: localspec', 'Content-Type: application/json',
        \ 'User-Agent: localspec-vim', 'Connection: close', 'Content-Length: ' .. strlen(body), '', body], "\r\n")
  call s:connect(request, a:start)
  return request
endfunction

" Stop it: the connection is closed, by which the daemon knows that nobody waits. Nothing is called any more.
function! localspec#http#cancel(request) abort
  let a:request.live = 0
  if has_key(a:request, 'stream')
    call localspec#socket#close(a:request.stream)
  endif
endfunction

function! s:connect(request, start) abort
  let stream = localspec#socket#open(localspec#daemon#socket(), function('s:came', [a:request]), function('s:closed', [a:request]))
  if !empty(stream)
    let a:request.stream = stream
    if !localspec#socket#send(stream, a:request.bytes)
      call timer_start(0, {_ -> s:closed(a:request)})
    endif
  elseif a:start
    call localspec#daemon#start({error -> empty(error) ? s:again(a:request) : s:end(a:request, error)})
  else
    call s:end(a:request, 'The daemon does not listen.')
  endif
endfunction

function! s:again(request) abort
  if a:request.live
    call s:connect(a:request, 0)
  endif
endfunction

function! s:came(request, bytes) abort
  if !a:request.live
    return
  endif
  try
    for event in localspec#http#feed(a:request.answer, a:bytes)
      if type(event) == v:t_dict && has_key(event, 'error')
        return s:end(a:request, s:reason(event, 'The answer broke off.'))
      elseif type(event) == v:t_dict && a:request.live
        call a:request.event(event)
      endif
    endfor
  catch
    return s:end(a:request, localspec#cause(v:exception))
  endtry
  if a:request.answer.state ==# 'done'
    call s:whole(a:request)
  endif
endfunction

function! s:closed(request) abort
  if !a:request.live
    return
  elseif localspec#http#closed(a:request.answer)
    call s:whole(a:request)
  else
    call s:end(a:request, 'The daemon closed the connection.')
  endif
endfunction

" The answer is whole; it may be an error in place of events.
function! s:whole(request) abort
  let answer = a:request.answer
  if answer.status == 200
    return s:end(a:request, '')
  endif
  try
    let error = s:reason(json_decode(answer.body), '')
  catch
    let error = ''
  endtry
  call s:end(a:request, empty(error) ? printf('The daemon answered %d.', answer.status) : error)
endfunction

function! s:end(request, error) abort
  if a:request.live
    call localspec#http#cancel(a:request)
    call a:request.ended(a:error)
  endif
endfunction

" What an error object says; `otherwise` where it says nothing.
function! s:reason(object, otherwise) abort
  let error = type(a:object) == v:t_dict ? get(a:object, 'error', {}) : {}
  let message = type(error) == v:t_dict ? get(error, 'message', '') : error
  return type(message) == v:t_string && !empty(message) ? message : a:otherwise
endfunction

" JSON, of texts that need not be UTF-8: where they are not, every byte is taken for Latin-1, rather than
" no suggestion at all. Neovim refuses such texts; Vim writes them as they are.
function! s:json(value) abort
  try
    let text = json_encode(a:value)
    if !has('iconv') || iconv(iconv(text, 'utf-8', 'utf-16'), 'utf-16', 'utf-8') ==# text
      return text
    endif
  catch
  endtry
  return json_encode(s:latin(a:value))
endfunction

function! s:latin(value) abort
  if type(a:value) == v:t_dict || type(a:value) == v:t_list
    return map(copy(a:value), {_, each -> s:latin(each)})
  endif
  return type(a:value) == v:t_string ? iconv(a:value, 'latin1', 'utf-8') : a:value
endfunction
