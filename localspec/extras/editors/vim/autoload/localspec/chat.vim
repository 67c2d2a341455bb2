" A conversation in a split: questions and answers as Markdown, and below them what is typed next. It is kept
" in the daemon's history, as those of `localspec chat` are.

let s:you = '## You'
let s:buffer = -1
let s:id = ''         " the conversation's, once it has begun
let s:request = {}

" Open the conversation; `quoted` and `text` are put where the next question is typed.
function! localspec#chat#open(quoted, text) abort
  if !empty(a:quoted .. a:text)
    call s:require_rest()
  endif
  call s:window()
  call s:put(a:quoted, a:text)
  call cursor('$', 1)
endfunction

" Ask in the conversation, and go back to where the question came from.
function! localspec#chat#ask(quoted, question) abort
  call s:require_rest()
  let here = win_getid()
  call s:window()
  call s:put(a:quoted, a:question)
  call localspec#chat#send()
  call win_gotoid(here)
endfunction

function! s:require_rest() abort
  if !empty(s:request)
    throw 'localspec: an answer is being written; :Localspec stop ends it'
  endif
endfunction

" Send what stands below the last heading.
function! localspec#chat#send() abort
  let lines = getbufline(s:buffer, 1, '$')
  let at = len(lines) - 1 - index(reverse(copy(lines)), s:you)
  let question = trim(join(lines[at + 1 :], "\n"))
  if empty(question) || !empty(s:request)
    return localspec#say(empty(question) ? 'type a question first.' : 'an answer is being written; <C-c> stops it.')
  endif
  call s:append("\n\n## localspec\n\n")
  let fields = {'stream': v:true, 'messages': [{'role': 'user', 'content': question}],
        \ 'localspec': {'kind': 'chat', 'conversation': empty(s:id) ? 'new' : s:id}}
  call localspec#note('…')
  let request = localspec#http#ask('/v1/chat/completions', extend(fields, localspec#model()), function('s:came'), function('s:ended'))
  let s:request = request.live ? request : {}
endfunction

" Stop the answer; what there is of it stays, here and in the history.
function! localspec#chat#stop() abort
  if !empty(s:request)
    call localspec#http#cancel(s:request)
    call s:ended('')
  endif
endfunction

" Forget the conversation here and begin another one; the history keeps it.
function! localspec#chat#new() abort
  call localspec#chat#stop()
  let s:id = ''
  call deletebufline(s:buffer, 1, '$')
  call setbufline(s:buffer, 1, [s:you, '', ''])
  call cursor('$', 1)
endfunction

function! s:came(event) abort
  let extra = get(a:event, 'localspec', {})
  if type(extra) == v:t_dict && type(get(extra, 'conversation', 0)) == v:t_string
    let s:id = extra.conversation
  endif
  call localspec#named(a:event)
  call s:append(localspec#chat#text(a:event))
endfunction

" The text in an event of a chat's stream.
function! localspec#chat#text(event) abort
  let choices = get(a:event, 'choices', [])
  let text = empty(choices) ? '' : get(get(choices[0], 'delta', {}), 'content', '')
  return type(text) == v:t_string ? text : ''
endfunction

" Whether its limit has ended the answer.
function! localspec#chat#cut(event) abort
  let choices = get(a:event, 'choices', [])
  return !empty(choices) && get(choices[0], 'finish_reason', '') is# 'length'
endfunction

function! s:ended(error) abort
  let s:request = {}
  call s:append((empty(a:error) ? '' : "\n\n> " .. a:error) .. "\n\n" .. s:you .. "\n\n")
  call localspec#note('')
endfunction

" Go to its window, or make one.
function! s:window() abort
  if bufwinid(s:buffer) > 0
    call win_gotoid(bufwinid(s:buffer))
    return
  endif
  execute get(g:, 'localspec_split', 'botright') 'new'
  if bufloaded(s:buffer)
    execute 'buffer' s:buffer
    return
  endif
  call localspec#chat#stop()
  let s:buffer = bufnr()
  setlocal buftype=nofile bufhidden=hide noswapfile nobuflisted filetype=markdown wrap linebreak
  setlocal statusline=%#StatusLine#\ localspec\ chat:\ <CR>\ sends,\ <C-c>\ stops,\ gn\ begins\ anew%=%{localspec#statusline()}
  silent! file localspec://chat
  nnoremap <buffer> <silent> <CR> <Cmd>call localspec#chat#send()<CR>
  nnoremap <buffer> <silent> <C-c> <Cmd>call localspec#chat#stop()<CR>
  nnoremap <buffer> <silent> gn <Cmd>call localspec#chat#new()<CR>
  let s:id = ''
  call setline(1, [s:you, '', ''])
endfunction

" Put text below the last heading; the cursor is behind it, and goes along with what comes.
function! s:put(quoted, text) abort
  call cursor('$', 1)
  call s:append(a:quoted .. (empty(a:quoted) ? '' : "\n\n") .. a:text)
endfunction

" Write on at the end; windows whose cursor is there go along.
function! s:append(text) abort
  if empty(a:text) || !bufloaded(s:buffer)
    return
  endif
  let last = getbufinfo(s:buffer)[0].linecount
  let along = filter(win_findbuf(s:buffer), {_, window -> line('.', window) == last})
  let lines = split(getbufline(s:buffer, last)[0] .. a:text, "\n", 1)
  call setbufline(s:buffer, last, lines[0])
  call appendbufline(s:buffer, last, lines[1:])
  for window in along
    call win_execute(window, 'call cursor("$", 1)')
  endfor
endfunction
